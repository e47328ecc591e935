from pathlib import Path

import pytest

from rlhf_core.store.artifacts import publish
from rlhf_core.store.checkpoints import complete, upload_shards
from rlhf_core.store.keys import stage_key
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.store.verify import verify

KEY = stage_key(stage="sft", version=1, settings={"seed": 0}, inputs={}, data={}, code={})
STEP = f"training/sft/{KEY.key}/step-000040"


@pytest.fixture
def filled(store: Store, tmp_path: Path) -> tuple[Store, Manifest]:
    """A store with one artifact and one whole training checkpoint."""
    local = tmp_path / "local"
    (local / "model").mkdir(parents=True)
    (local / "model" / "model.safetensors").write_bytes(b"weights" * 1000)
    (local / "metrics.jsonl").write_text("{}\n")
    fields = {"stage": "sft", "key": KEY.key, "key_source": KEY.source}
    manifest = publish(store, local_dir=local, manifest_fields=fields, lease=None)
    complete(store, "sft", KEY.key, 40, upload_shards(store, "sft", KEY.key, 40, local), {}, None)
    return store, manifest


def faults(store: Store) -> list[tuple[str, str]]:
    return [(one.path, one.problem) for one in verify(store) if one.fault]


def test_what_was_published_verifies_file_by_file(filled: tuple[Store, Manifest]) -> None:
    store, manifest = filled
    top = f"artifacts/sft/{KEY.key}"
    assert [(one.path, one.problem) for one in verify(store)] == [
        (f"{top}/manifest.json", "ok"),
        (f"{top}/{manifest.attempt}/metrics.jsonl", "ok"),
        (f"{top}/{manifest.attempt}/model/model.safetensors", "ok"),
        (f"{STEP}/COMPLETE", "ok"),
        (f"{STEP}/metrics.jsonl", "ok"),
        (f"{STEP}/model/model.safetensors", "ok"),
    ]


@pytest.mark.parametrize("place", ["artifact", "checkpoint"])
def test_damaged_missing_and_foreign_files_are_named(filled: tuple[Store, Manifest], place: str) -> None:
    store, manifest = filled
    top = f"artifacts/sft/{KEY.key}/{manifest.attempt}" if place == "artifact" else STEP
    same_length = b"Weights" + b"weights" * 999
    store.write_bytes(f"{top}/model/model.safetensors", same_length)
    store.delete_file(f"{top}/metrics.jsonl")
    store.write_bytes(f"{top}/pickled.bin", b"?")
    assert faults(store) == [
        (f"{top}/metrics.jsonl", "missing"),
        (f"{top}/model/model.safetensors", "damaged"),
        (f"{top}/pickled.bin", "foreign"),
    ]


def test_a_manifest_and_a_marker_that_are_none_are_damaged(filled: tuple[Store, Manifest]) -> None:
    store, manifest = filled
    path = f"artifacts/sft/{KEY.key}/manifest.json"
    other_source = manifest.model_copy(update={"key_source": {**manifest.key_source, "version": 2}})
    store.write_bytes(path, other_source.to_bytes())
    store.write_bytes(f"{STEP}/COMPLETE", b"{}")
    assert faults(store) == [(path, "damaged"), (f"{STEP}/COMPLETE", "damaged")]
    store.write_bytes(path, b"{")
    assert faults(store)[0] == (path, "damaged")


def test_what_is_not_finished_is_no_fault(filled: tuple[Store, Manifest]) -> None:
    store, _ = filled
    unfinished = ["artifacts/sft/%s/other/x", "artifacts/sft/%s/half/x", "training/sft/%s/step-000050/x"]
    keys = [KEY.key, "ab" * 32, KEY.key]
    for path, key in zip(unfinished, keys, strict=True):
        store.write_bytes(path % key, b"half")
    assert faults(store) == []
    found = {one.path for one in verify(store) if one.problem == "unfinished"}
    assert found == {str(Path(path % key).parent) for path, key in zip(unfinished, keys, strict=True)}


def test_a_checkpoint_that_rotation_takes_away_meanwhile_is_left_out(filled: tuple[Store, Manifest]) -> None:
    store, _ = filled
    findings = verify(store)
    while next(findings).path != f"{STEP}/COMPLETE":
        pass
    store.delete_file(f"{STEP}/COMPLETE")
    store.delete_dir(STEP)
    assert [one for one in findings if one.fault] == []


def test_token_caches_are_verified(store: Store) -> None:
    store.write_bytes("cache/tokens/abc/one/tokens.arrow", b"x")
    store.write_bytes("cache/tokens/abc/COMPLETE.json", b'{"attempt": "one", "files": {"tokens.arrow": "00"}}')
    assert faults(store) == [("cache/tokens/abc/one/tokens.arrow", "damaged")]
