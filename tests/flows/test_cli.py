"""The `rlhf` command: what it refuses in one line before anything starts, and what `plan` says."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from flows import follow, services
from flows.api import Api
from flows.cli import app, run_parameters
from flows.follow import MemoryPeak, NodeView, RunView
from flows.processes import identify
from flows.sft_rm_ppo import resolve
from rlhf_core.config.pipeline import load_pipeline, read_pipeline

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"
LLAMA = DEMO.with_name("llama3-8b.yaml")


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
    cut = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    rows = {cells[1]: cells for cells in cut if len(cells) > 5 and len(cells[2]) == 12}
    assert [rows[node][3] for node in ("data-sft", "sft", "rm", "ppo", "evaluate")] == ["to run"] * 5
    assert "the store has nothing of sft" in " ".join(rows["sft"])
    assert out.rstrip().endswith("9 to run, 0 resumed, 0 reused")


def test_plan_as_markdown_has_a_row_for_each_stage(rlhf):
    code, out, _ = rlhf("plan", str(DEMO), "--markdown")
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in out.splitlines()[2:11]}
    assert code == 0
    assert list(cells)[-4:] == ["sft", "rm", "ppo", "evaluate"]
    # Two trainer ranks and an engine.
    assert cells["ppo"][4] == "3"


def test_an_override_changes_the_keys_from_its_stage_on(rlhf):
    def keys(*arguments: str) -> dict[str, str]:
        out = rlhf("plan", str(DEMO), *arguments)[1]
        rows = [c for line in out.splitlines() if len(c := [part.strip() for part in line.split("│")]) > 5]
        return {c[1]: c[2] for c in rows if len(c[2]) == 12}

    before, after = keys(), keys("--set", "rm.optimizer.lr=1e-5")
    assert {node for node in before if before[node] != after[node]} == {"rm", "ppo", "evaluate"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "missing.yaml"], "error: pipeline file missing.yaml does not exist"),
        (["plan", str(DEMO), "--set", "ppo.stepz=3"], "error: ppo.stepz: unknown setting; did you mean 'steps'?"),
        (["plan", str(DEMO), "--set", "run.store=ftp://x"], "error: store 'ftp://x' has the scheme 'ftp'"),
        (["plan", str(DEMO), "--set", f"run.store={DEMO}"], "error: artifacts/prepare-data/"),
        (["replay", "ab12", "--out", "again", "--store", "s3://"], "error: store 's3://' names no bucket"),
        (["replay", "ab12", "--out", "again"], "error: store "),
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


def test_a_plan_without_credentials_is_refused_in_one_line(tmp_path: Path):
    """In a process of its own, since s3fs keeps what it found."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    command = [str(Path(sys.executable).with_name("rlhf")), "plan", str(LLAMA)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: data.sft.path: file s3://my-bucket/data/sft.jsonl cannot be read: Unable to")
    assert done.stderr.count("\n") == 1


def test_what_may_not_be_read_is_one_line(rlhf, monkeypatch: pytest.MonkeyPatch):
    def refuse(project: Path) -> None:
        raise PermissionError(13, "Permission denied", ".rlhf/services.json")

    monkeypatch.setattr(services, "down", refuse)
    assert rlhf("down") == (1, "", "error: [Errno 13] Permission denied: '.rlhf/services.json'\n")


class Calls(list):
    def __call__(self, *arguments):
        self.append(arguments)


@pytest.fixture
def a_server_answers(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """As if a server was up; returns the runs that were created there."""
    created = Calls()
    monkeypatch.setattr(services, "running", lambda project: services.Services(port=1))
    monkeypatch.setattr("flows.cli._create_run", created)
    return created


@pytest.mark.parametrize("command", [["run", str(DEMO)], ["demo"]])
def test_a_store_that_cannot_be_written_is_refused_before_a_run_is_created(
    rlhf, tmp_path: Path, a_server_answers: Calls, command: list[str]
):
    (tmp_path / ".rlhf").mkdir()
    (tmp_path / ".rlhf" / "store").write_text("a file")
    code, _, err = rlhf(*command)
    assert code == 1
    assert err.startswith(f"error: store '{tmp_path}/.rlhf/store' cannot be written")
    assert a_server_answers == []


@pytest.mark.parametrize(
    ("started", "stopped"), [(["server", "worker-cpu", "worker-gpu"], True), (["worker-cpu"], False)]
)
def test_demo_stops_the_server_only_if_it_started_it(
    rlhf, monkeypatch: pytest.MonkeyPatch, started: list[str], stopped: bool
):
    """A server that lives but misses a health check is not `running`, and `up` finds it there."""
    down = Calls()
    monkeypatch.setattr(services, "running", lambda project: None)
    monkeypatch.setattr(services, "up", lambda project: services.UpResult(services.Services(port=1), started))
    monkeypatch.setattr(services, "down", down)
    monkeypatch.setattr("flows.cli._run_and_report", lambda *arguments: None)
    assert rlhf("demo")[0] == 0
    assert bool(down) == stopped


class Answers(RunView):
    """A run of which the server says this, one after the other."""

    def __init__(self, *answers: dict | Exception):
        super().__init__("run", {})
        self.answers = list(answers)

    def refresh(self, api: Api) -> dict:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://server")
    return httpx.HTTPStatusError(f"{code}", request=request, response=httpx.Response(code, request=request))


def follow_answers(*answers: dict | Exception) -> dict:
    with Api("http://127.0.0.1:1/api") as api:
        return follow.follow(api, Answers(*answers), Console(quiet=True), lambda: None)


def test_a_server_that_fails_for_a_while_does_not_end_the_following(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    ended = {"state_type": "COMPLETED"}
    assert follow_answers(status(503), httpx.ReadTimeout("late"), status(500), ended) == ended


@pytest.mark.parametrize("code", [404, 503])
def test_a_server_that_refuses_or_fails_for_long_does(monkeypatch: pytest.MonkeyPatch, code: int):
    monkeypatch.setattr(follow, "POLL_S", 0.0)
    if code == 503:
        monkeypatch.setattr(follow, "PATIENCE_S", -1.0)
    with pytest.raises(httpx.HTTPStatusError, match=str(code)):
        follow_answers(status(code), {"state_type": "COMPLETED"})


def test_a_section_that_a_file_leaves_out_is_not_that_of_the_registered_file(tmp_path: Path):
    mine = tmp_path / "demo.yaml"
    values = read_pipeline(DEMO)
    values["ppo"]["reward"] = {"exact": 1.0}
    mine.write_text(yaml.safe_dump({name: value for name, value in values.items() if name not in ("rm", "run")}))
    # What Prefect makes of a registered deployment's parameters and those of a run.
    merged = read_pipeline(DEMO) | run_parameters(mine, ["ppo.steps=7"])
    overrides = merged.pop("set")
    settings = resolve(merged, overrides)
    assert settings == load_pipeline(mine, ["ppo.steps=7"])
    assert settings.rm is None


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
