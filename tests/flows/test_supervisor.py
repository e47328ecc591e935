"""The supervisor on small Python drivers: what it reports, and that nothing outlives it."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from flows.processes import ProcessId, alive, identify, wait_gone
from flows.supervisor import OutputPump, StageFailed, StageStopped, Watch, failure, supervise
from rlhf_core.cluster.leftovers import attempt_name, leftovers

# Starts a process in a session of its own, orphans it, and writes its pid; as Ray and vLLM do.
STRAY = """
import os, subprocess, sys, time
code = '''
import subprocess, sys
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(sleeper.pid))
'''
subprocess.run([sys.executable, "-c", code, sys.argv[1] + ".part"], start_new_session=True)
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


# Makes what a driver makes, in the scratch directory and outside of it, and says that it is there.
FILES = """
import os, sys, tempfile, time
from pathlib import Path
from rlhf_core.cluster.leftovers import directory_prefix
scratch = Path(sys.argv[1])
for name in ("inputs/sft", "artifact/model", "base-0"):
    (scratch / name).mkdir(parents=True)
    (scratch / name / "model.safetensors").write_text("weights")
os.symlink(sys.argv[2], scratch / "link")
(scratch / "spec.json").write_text("{}")
for kind, root in (("ray", "/tmp"), ("weights", "/dev/shm")):
    Path(tempfile.mkdtemp(prefix=directory_prefix(kind), dir=root), "session").write_text("files")
(scratch / "events.jsonl").write_text('{"type": "phase", "name": "train"}\\n')
"""


class Run:
    """One call of `supervise`, with what it passed on."""

    def __init__(self, folder: Path):
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.events_file = self.scratch / "events.jsonl"
        self.log = self.scratch / "driver.log"
        self.events: list[dict] = []
        self.lines: list[str] = []

    def __call__(self, code: str, *arguments: str, stop=lambda: None, event=None) -> None:
        supervise(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            scratch=self.scratch,
            watch=Watch(event=event or self.events.append, line=self.lines.append, stop=stop),
            watch_every_s=0.05,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def error_event(role: str, rank: int | None, message: str, kind: str = "ValueError") -> str:
    return json.dumps({"type": "error", "role": role, "rank": rank, "kind": kind, "message": message})


def wait_for_pid(file: Path) -> ProcessId:
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process = identify(int(file.read_text()))
    assert process is not None
    return process


def test_a_driver_that_ends_well_delivers_its_events_and_whole_output(run: Run, tmp_path: Path):
    event = {"type": "progress", "step": 1, "total": 2, "phase": "train"}
    run(
        """
        import sys
        print("out"); print("err", file=sys.stderr)
        open(sys.argv[1], "a").write(sys.argv[2] + "\\n")
        """,
        str(run.events_file),
        json.dumps(event),
    )
    assert run.events == [event]
    assert sorted(run.log.read_text().split()) == ["err", "out"]
    assert sorted(run.lines) == ["err", "out"]


def test_the_first_error_event_is_what_is_raised(run: Run):
    lines = [error_event("policy", 1, "reward is NaN"), error_event("policy", 0, "connection closed by peer")]
    run.events_file.write_text(error_event("policy", 0, "of an earlier attempt") + "\n")
    with pytest.raises(StageFailed, match=r"^policy rank 1: ValueError: reward is NaN$"):
        run(
            "import sys; open(sys.argv[1], 'a').write('\\n'.join(sys.argv[2:]) + '\\n'); sys.exit(1)",
            str(run.events_file),
            *lines,
        )


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("ClusterError", "trainer rank 1: its process ended", "trainer rank 1: its process ended"),
        ("StoreError", "the store is full", "driver: StoreError: the store is full"),
    ],
)
def test_the_drivers_own_last_error_is_preferred_to_what_ranks_wrote(run: Run, kind: str, message: str, expected: str):
    lines = [
        error_event("driver", None, "tried again"),
        error_event("driver", None, message, kind),
        error_event("policy", 0, "connection closed by peer"),
    ]
    with pytest.raises(StageFailed, match=f"^{expected}$"):
        run(
            "import sys; open(sys.argv[1], 'a').write('\\n'.join(sys.argv[2:]) + '\\n'); sys.exit(1)",
            str(run.events_file),
            error_event("policy", 0, "connection reset"),
            *lines,
        )


def test_without_an_error_event_the_exit_and_the_last_line_are_named(run: Run):
    with pytest.raises(StageFailed, match=r"exit code 3 .*its last line: out of memory$"):
        run("import sys; print('out of memory'); sys.exit(3)")


def test_a_killed_driver_is_reported_by_its_signal(run: Run):
    with pytest.raises(StageFailed, match="signal SIGKILL"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_a_command_that_does_not_exist_is_named(run: Run):
    with pytest.raises(StageFailed, match="/no/such/driver cannot be started"):
        supervise(
            ["/no/such/driver"],
            scratch=run.scratch,
            watch=Watch(event=run.events.append, line=run.lines.append, stop=lambda: None),
        )


@pytest.mark.parametrize("ending", ["", "sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_nothing_outlives_the_driver_whatever_its_session(run: Run, tmp_path: Path, ending: str):
    pid_file = tmp_path / "stray"
    code = STRAY + f"print(open(sys.argv[1]).read())\n{ending}"
    if ending:
        with pytest.raises(StageFailed):
            run(code, str(pid_file))
    else:
        run(code, str(pid_file))
    assert identify(int(pid_file.read_text())) is None


def test_the_watchdog_ends_driver_and_strays(run: Run, tmp_path: Path):
    pid_file = tmp_path / "stray"
    with pytest.raises(StageStopped, match=r"^this run was cancelled$"):
        run(
            STRAY + "time.sleep(600)",
            str(pid_file),
            stop=lambda: "this run was cancelled" if pid_file.exists() else None,
        )
    assert identify(int(pid_file.read_text())) is None


def test_an_interruption_ends_the_driver_and_passes_through(run: Run, tmp_path: Path):
    def interrupt(event: dict) -> None:
        raise KeyboardInterrupt

    pid_file = tmp_path / "stray"
    code = STRAY + 'open(sys.argv[2], \'a\').write(\'{"type": "phase", "name": "train"}\\n\'); time.sleep(600)'
    with pytest.raises(KeyboardInterrupt):
        run(code, str(pid_file), str(run.events_file), event=interrupt)
    assert identify(int(pid_file.read_text())) is None


def test_killing_the_supervisor_ends_driver_and_strays(tmp_path: Path):
    driver_file, stray_file = tmp_path / "driver", tmp_path / "stray"
    driver = STRAY + "open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(600)"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = f"""
from pathlib import Path
import sys
from flows.supervisor import Watch, supervise
watch = Watch(event=lambda event: None, line=lambda line: None, stop=lambda: None)
supervise([sys.executable, "-c", {driver!r}, {str(stray_file)!r}, {str(driver_file)!r}],
          scratch=Path({str(scratch)!r}), watch=watch)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code])
    stray = wait_for_pid(stray_file)
    deadline = time.monotonic() + 60
    while not (driver_file.exists() and driver_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    driver_process = wait_for_pid(driver_file)
    assert alive(stray)
    assert alive(driver_process)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    assert wait_gone([stray, driver_process], 30.0) == []


@pytest.mark.parametrize(
    "ending", ["", "sys.exit(1)", "os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 9); time.sleep(600)"]
)
def test_of_the_files_of_an_attempt_only_spec_log_and_events_stay(run: Run, tmp_path: Path, ending: str):
    """The last ending kills the guardian, so that the supervisor has to remove the files."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("not of this attempt")
    seen: list[Path] = []
    code = FILES + (ending and f"time.sleep(1)\n{ending}")
    arguments = (code, str(run.scratch), str(outside))
    see = lambda event: seen.extend(leftovers(attempt_name(run.scratch)))  # noqa: E731
    if ending:
        with pytest.raises(StageFailed):
            run(*arguments, event=see)
        assert sorted(path.parent for path in seen) == [Path("/dev/shm"), Path("/tmp")]
    else:
        run(*arguments)
    assert leftovers(attempt_name(run.scratch)) == []
    assert sorted(path.name for path in run.scratch.iterdir()) == ["driver.log", "events.jsonl", "spec.json"]
    assert (outside / "kept").exists()


def test_killing_the_supervisor_leaves_no_files(tmp_path: Path):
    scratch, outside = tmp_path / "scratch", tmp_path / "outside"
    scratch.mkdir()
    another = Path(tempfile.mkdtemp(prefix="rlhf-ray-another-", dir="/tmp"))
    code = f"""
from pathlib import Path
import os, sys
from flows.supervisor import Watch, supervise
watch = Watch(event=lambda event: os.kill(os.getpid(), 9), line=lambda line: None, stop=lambda: None)
supervise([sys.executable, "-c", {FILES + "time.sleep(600)"!r}, {str(scratch)!r}, {str(outside)!r}],
          scratch=Path({str(scratch)!r}), watch=watch)
"""
    try:
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while len(list(scratch.iterdir())) > 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert leftovers(attempt_name(scratch)) == []
        assert sorted(path.name for path in scratch.iterdir()) == ["driver.log", "events.jsonl", "spec.json"]
        assert another.is_dir()
    finally:
        another.rmdir()


def test_at_most_twenty_lines_a_second_pass_and_the_log_has_all():
    # 50 lines at second 0, one at 0.5, one at 1.0: 20 pass at once, the next one a second after the first.
    times = iter([0.0] * 50 + [0.5, 1.0])
    source = io.BytesIO(b"".join(b"line %d\n" % number for number in range(52)))
    output, passed = io.BytesIO(), []
    pump = OutputPump(source, output, passed.append, clock=lambda: next(times))
    pump.run()
    assert passed[:20] == [f"line {number}" for number in range(20)]
    assert passed[20:] == ["(31 lines left out here; the log file has all)", "line 51"]
    assert output.getvalue() == source.getvalue()
    assert pump.last_line == "line 51"


def test_a_redrawn_line_passes_as_a_terminal_would_show_it():
    passed: list[str] = []
    OutputPump(io.BytesIO(b"10%\r50%\r100%\n\n"), io.BytesIO(), passed.append).run()
    assert passed == ["100%"]


def test_failure_names_the_role_alone_when_there_is_no_rank():
    event = {"role": "driver", "rank": None, "kind": "StoreError", "message": "cannot be written"}
    assert failure(2, event, "") == "driver: StoreError: cannot be written"


def test_a_killed_guardian_takes_driver_and_strays_along(run: Run, tmp_path: Path):
    pid_file = tmp_path / "stray"
    with pytest.raises(StageFailed, match="signal SIGKILL"):
        run(STRAY + "os.kill(os.getppid(), 9); time.sleep(600)", str(pid_file))
    assert identify(int(pid_file.read_text())) is None


def test_own_children_from_before_are_left_alone(run: Run):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run("pass")
        assert bystander.poll() is None
    finally:
        os.kill(bystander.pid, signal.SIGKILL)
        bystander.wait()
