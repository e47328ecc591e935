"""`rlhf verify`, `gc` and `lineage` on a store in the folder that they are called in, as docs/store.md says."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import publish
from rlhf_core.store.gc import note_inputs
from rlhf_core.store.leases import acquire
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """All artifacts of the demo, 31 days old."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rows.jsonl").write_text("{}\n")
    store = Store(".rlhf/store")
    manifests: list[Manifest] = []
    for one in plan_pipeline(load_pipeline(DEMO)):
        source = one.key.source
        fields = {"stage": one.stage.name, "key": one.key.key, "key_source": source, "inputs": source["inputs"]}
        manifests.append(publish(store, local_dir=tmp_path / "files", manifest_fields=fields, lease=None))
    then = time.time() - 31 * 86400
    for file in Path(store.url).rglob("*"):
        os.utime(file, (then, then))
    return manifests


def rlhf(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_verify_names_what_is_damaged_and_exits_with_1(made: list[Manifest]):
    assert rlhf("verify") == (0, "18 files verified, 0 faults, 0 unfinished attempts or checkpoints\n", "")
    path = f"artifacts/{made[-1].stage}/{made[-1].key}/{made[-1].attempt}/rows.jsonl"
    Path(".rlhf/store", path).write_text("[]\n")
    code, out, _ = rlhf("verify")
    assert code == 1
    assert out.startswith(f"damaged: {path}: SHA-256 ")
    assert out.endswith("17 files verified, 1 faults, 0 unfinished attempts or checkpoints\n")


def test_gc_says_first_and_deletes_when_told(made: list[Manifest]):
    code, out, _ = rlhf("gc")
    assert (code, out.count("artifact: ")) == (0, 9)
    assert out.splitlines()[-1].endswith("nothing was deleted, --delete does it")
    assert rlhf("gc", "--pipeline", str(DEMO), "--delete")[1] == "0 objects, 0.000 GiB deleted\n"
    assert rlhf("gc", "--older-than", "40", "--delete")[1] == "0 objects, 0.000 GiB deleted\n"
    rm = next(manifest for manifest in made if manifest.stage == "rm")
    # The reward model, the SFT model, and the data of both.
    assert rlhf("gc", "--keep", f"rm/{rm.key[:12]}", "--delete")[1].splitlines()[-1].startswith("5 objects, ")
    assert rlhf("verify")[1] == "8 files verified, 0 faults, 0 unfinished attempts or checkpoints\n"
    assert rlhf("gc", "--keep", "rm/ffff")[0] == 1


def test_gc_takes_what_old_attempts_left_on_this_machine(made: list[Manifest]):
    key = made[-1].key
    scratch = Path(".rlhf/scratch")
    for directory in (
        f"ppo-{key[:12]}/00000001-1",
        f"ppo-{key[:12]}/00000002-1",
        f"rm-{'ab' * 6}/00000003-1",
        "mine/x",
    ):
        (scratch / directory).mkdir(parents=True)
        (scratch / directory / "driver.log").write_text("log")
        then = time.time() - (1 if directory.endswith("2-1") else 31) * 86400
        os.utime(scratch / directory / "driver.log", (then, then))
    acquire(Store(".rlhf/store"), "rm", "ab" * 32, {}, 3600)
    note_inputs(Store(".rlhf/store"), "rm", "ab" * 32, [])
    arguments = ["gc", "--pipeline", str(DEMO)]
    path = scratch / f"ppo-{key[:12]}/00000001-1"
    assert f"scratch: {path}: " in rlhf(*arguments)[1]
    assert path.is_dir()
    assert rlhf(*arguments, "--delete")[1].count("scratch: ") == 1
    left = sorted(file.parent.name for file in scratch.rglob("driver.log"))
    assert left == ["00000002-1", "00000003-1", "x"]


def test_lineage_is_json_and_a_picture(made: list[Manifest]):
    ppo = next(manifest for manifest in made if manifest.stage == "ppo")
    code, out, _ = rlhf("lineage", f"ppo/{ppo.key[:12]}", "--svg", "lineage.svg")
    assert code == 0
    assert {name.split("/")[0] for name in json.loads(out)["artifacts"]} == {"prepare-data", "sft", "rm", "ppo"}
    assert ppo.key[:12] in Path("lineage.svg").read_text()


@pytest.mark.parametrize("arguments", [["verify"], ["gc"], ["lineage", "ppo/ab"]])
def test_a_store_that_cannot_be_opened_is_one_line(arguments: list[str]):
    code, _, err = rlhf(*arguments, "--store", "ftp://x")
    assert code == 1
    assert err.startswith("error: store 'ftp://x' has the scheme 'ftp'")
    assert err.count("\n") == 1
