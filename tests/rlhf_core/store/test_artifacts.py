import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.store.artifacts import fetch, publish, read_manifest
from rlhf_core.store.keys import directory_digest, stage_key
from rlhf_core.store.leases import LeaseLost, acquire
from rlhf_core.store.manifest import Manifest, content_digest
from rlhf_core.store.store import Store, StoreError

KEY = stage_key(stage="sft", version=1, settings={"seed": 0}, inputs={}, data={}, code={})
TOP = f"artifacts/sft/{KEY.key}"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fields(**more: Any) -> dict[str, Any]:
    return {"stage": "sft", "key": KEY.key, "key_source": KEY.source, **more}


def artifact(path: Path, weights: str = "weights") -> Path:
    (path / "model").mkdir(parents=True)
    (path / "model" / "model.safetensors").write_text(weights)
    (path / "metrics.jsonl").write_text("{}\n")
    return path


def test_published_artifacts_come_back(store: Store, tmp_path: Path) -> None:
    local = artifact(tmp_path / "local")
    assert read_manifest(store, "sft", KEY.key) is None
    lease = acquire(store, "sft", KEY.key, {}, 60.0)
    published = publish(
        store,
        local_dir=local,
        manifest_fields=fields(inputs={"data": "cd" * 32}, metrics={"loss": 0.5, "bad": float("nan")}),
        lease=lease,
    )
    assert published.files == {"model/model.safetensors": sha256("weights"), "metrics.jsonl": sha256("{}\n")}
    assert published.content_digest == directory_digest(local / "model")
    assert published.metrics == {"loss": 0.5, "bad": "nan"}
    assert store.list_names(TOP) == sorted([published.attempt, "manifest.json"])
    assert read_manifest(store, "sft", KEY.key) == published
    fetched = fetch(store, published, tmp_path / "fetched")
    assert (fetched / "model" / "model.safetensors").read_text() == "weights"
    assert fetch(store, published, tmp_path / "fetched") == fetched


def test_nothing_published_is_overwritten(store: Store, tmp_path: Path) -> None:
    first = publish(store, local_dir=artifact(tmp_path / "1"), manifest_fields=fields(), lease=None)
    second = publish(store, local_dir=artifact(tmp_path / "2", "other"), manifest_fields=fields(), lease=None)
    assert second == first
    assert store.list_names(TOP) == sorted([first.attempt, "manifest.json"])


def test_the_first_to_commit_wins_and_all_agree(store: Store, tmp_path: Path) -> None:
    barrier = Barrier(4)
    locals_ = [artifact(tmp_path / str(index), weights=str(index)) for index in range(4)]

    def attempt(local: Path) -> Manifest:
        barrier.wait()
        return publish(store, local_dir=local, manifest_fields=fields(), lease=None)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(attempt, locals_))
    winner = read_manifest(store, "sft", KEY.key)
    assert winner is not None
    assert outcomes == [winner] * 4
    weights = fetch(store, winner, tmp_path / "fetched") / "model" / "model.safetensors"
    assert sha256(weights.read_text()) == winner.files["model/model.safetensors"]


class LosesLeaseWhileUploading(Store):
    """Between the last upload and the commit, someone else takes the lease."""

    def upload_dir(self, local_dir: str | Path, path: str) -> dict[str, str]:
        files = super().upload_dir(local_dir, path)
        acquire(self, "sft", KEY.key, {"flow_run": "taker"}, 60.0, clock=lambda: 2000.0)
        return files


def test_who_lost_the_lease_does_not_publish(store: Store, tmp_path: Path) -> None:
    losing = LosesLeaseWhileUploading(store.url)
    lease = acquire(losing, "sft", KEY.key, {"flow_run": "slow"}, 60.0, clock=lambda: 1000.0)
    with pytest.raises(LeaseLost, match="'taker'"):
        publish(losing, local_dir=artifact(tmp_path / "1"), manifest_fields=fields(), lease=lease)
    assert read_manifest(store, "sft", KEY.key) is None


def test_bad_fields_are_refused_before_anything_is_uploaded(store: Store, tmp_path: Path) -> None:
    local = artifact(tmp_path / "1")
    with pytest.raises(ValidationError, match="wall_secs"):
        publish(store, local_dir=local, manifest_fields=fields(wall_secs=1.0), lease=None)
    with pytest.raises(ValueError, match="not that of its key_source"):
        publish(store, local_dir=local, manifest_fields={**fields(), "key": "0" * 64}, lease=None)
    with pytest.raises(ValidationError, match="key"):
        publish(store, local_dir=local, manifest_fields={**fields(), "key": "short"}, lease=None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="holds no files to publish"):
        publish(store, local_dir=tmp_path / "empty", manifest_fields=fields(), lease=None)
    assert store.list_names("") == []


def test_a_damaged_artifact_is_named(store: Store, tmp_path: Path) -> None:
    published = publish(store, local_dir=artifact(tmp_path / "1"), manifest_fields=fields(), lease=None)
    path = f"{TOP}/{published.attempt}/model/model.safetensors"
    store.write_bytes(path, b"WEIGHTS")
    with pytest.raises(StoreError, match=f"{path} .*damaged"):
        fetch(store, published, tmp_path / "fetched")
    store.delete_file(path)
    with pytest.raises(StoreError, match=f"{path} is missing"):
        fetch(store, published, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


def test_a_damaged_manifest_is_named(store: Store, tmp_path: Path) -> None:
    published = publish(store, local_dir=artifact(tmp_path / "1"), manifest_fields=fields(), lease=None)
    good = json.loads(store.read_bytes(f"{TOP}/manifest.json"))
    damaged = {
        "Invalid JSON": json.dumps(good)[:100],
        "files: Field required": json.dumps({name: value for name, value in good.items() if name != "files"}),
        "schema_version": json.dumps({**good, "schema_version": 2}),
        "store path '../x'": json.dumps({**good, "files": {"../x": "0" * 64}}),
        f"says that it is rm/{published.key}": json.dumps({**good, "stage": "rm"}),
    }
    for message, text in damaged.items():
        store.write_bytes(f"{TOP}/manifest.json", text.encode())
        with pytest.raises(StoreError, match=f"{TOP}/manifest.json .*{message}"):
            read_manifest(store, "sft", KEY.key)


def test_a_killed_upload_is_no_artifact(store: Store, tmp_path: Path) -> None:
    store.upload_dir(artifact(tmp_path / "1"), f"{TOP}/killed-attempt")
    assert read_manifest(store, "sft", KEY.key) is None
    published = publish(store, local_dir=artifact(tmp_path / "2", "whole"), manifest_fields=fields(), lease=None)
    assert published.attempt != "killed-attempt"
    assert published.files["model/model.safetensors"] == sha256("whole")


def test_content_digest_covers_rows_when_there_is_no_model() -> None:
    one, two, three = "1" * 64, "2" * 64, "3" * 64
    rows = sha256(f'[["sft/train.jsonl","{one}"]]')
    assert content_digest({"sft/train.jsonl": one, "data_report.json": two, "metrics.jsonl": three}) == rows
    assert content_digest({"b.json": two, "a.json": one}) == sha256(f'[["a.json","{one}"],["b.json","{two}"]]')
