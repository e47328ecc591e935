"""The `rlhf` command: what it refuses in one line before anything starts, and what `plan` says."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.follow import MemoryPeak, NodeView
from flows.processes import identify

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"


@pytest.fixture
def rlhf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `rlhf` in an empty folder; returns the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, result.stdout, result.stderr

    return call


def test_plan_says_what_would_be_made(rlhf):
    code, out, _ = rlhf("plan", str(DEMO))
    assert code == 0
    rows = {cells[1]: cells[-2] for line in out.splitlines() if len(cells := [c.strip() for c in line.split("│")]) > 4}
    assert rows["sft"] == rows["rm"] == rows["ppo"] == rows["evaluate"] == "make"


def test_an_override_changes_the_keys_from_its_stage_on(rlhf):
    def keys(*arguments: str) -> dict[str, str]:
        out = rlhf("plan", str(DEMO), *arguments)[1]
        return {c[1]: c[3] for line in out.splitlines() if len(c := [part.strip() for part in line.split("│")]) > 4}

    before, after = keys(), keys("--set", "rm.optimizer.lr=1e-5")
    assert {node for node in before if before[node] != after[node]} == {"rm", "ppo", "evaluate"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "missing.yaml"], "error: pipeline file missing.yaml does not exist"),
        (["plan", str(DEMO), "--set", "ppo.stepz=3"], "error: ppo.stepz: unknown setting; did you mean 'steps'?"),
        (["plan", str(DEMO), "--set", "run.store=ftp://x"], "error: store 'ftp://x' has the scheme 'ftp'"),
        (["run", str(DEMO)], "error: no Prefect server runs for this folder; start one with `rlhf up`"),
    ],
)
def test_a_fault_is_one_line_and_leaves_nothing_behind(rlhf, tmp_path: Path, arguments: list[str], message: str):
    code, out, err = rlhf(*arguments)
    assert code == 1
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_down_where_nothing_is_up_is_fine(rlhf):
    assert rlhf("down")[:2] == (0, "nothing was up\n")


def test_the_bar_follows_the_events():
    view = NodeView()
    view.event({"type": "phase", "name": "starting ranks"})
    assert (view.done, view.text) == (0.0, "starting ranks")
    view.event({"type": "progress", "step": 30, "total": 40, "phase": "train"})
    assert (view.done, view.text) == (0.75, "train 30/40")
    view.event({"type": "error", "kind": "ValueError", "message": "reward is NaN"})
    assert view.text == "ValueError: reward is NaN"


def test_the_memory_of_grandchildren_counts(tmp_path: Path):
    ready = tmp_path / "ready"
    inner = f"import time; block = bytearray(b'1') * 200_000_000; open({str(ready)!r}, 'w').close(); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)
    try:
        while not ready.exists():
            time.sleep(0.02)
        root = identify(process.pid)
        assert root is not None
        memory = MemoryPeak(lambda: [root])
        memory.start()
        memory.stop()
        assert 200_000_000 < memory.peak_bytes < 400_000_000
    finally:
        from flows.processes import end_descendants

        end_descendants(process.pid, 1.0)
        process.kill()
        process.wait()
