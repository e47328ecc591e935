"""The pool of processes: limits, named failures, and that nothing outlives the driver."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import SandboxSettings
from rlhf_core.rollout.outcomes import Failed, Outcome, Scored
from rlhf_core.rollout.process_tree import descendants
from rlhf_core.rollout.sandbox import Call, Sandbox, Setup

SOURCE = """
import os, subprocess, sys, threading, time

def reward_func(queries, prompts, labels):
    return {"rewards": [globals()[query](label) for query, label in zip(queries, labels)]}

def length(label): return float(len(label))
def hang(label):
    while True: pass
def begin_and_hang(label):
    open(label, "w").close()
    hang(label)
def power(label): return float(len(str(9**9**9)))
def backtrack(label):
    import re
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))
def memory(label):
    held = [b"x" * 2**20 for _ in range(4096)]
    time.sleep(60)
def memory_of_a_child(label):
    subprocess.run([sys.executable, "-c", "import time; x = bytearray(b'x') * 2**29; time.sleep(60)"])
held = []
def keep(label):
    held.append(bytearray(b"x") * (int(label) * 2**20))
    time.sleep(0.1)
    return float(len(held))
def allocate(label): return float(len(bytearray(2**60)))
def leave(label): os._exit(3)
def leave_politely(label): sys.exit(0)
def error(label): raise KeyError("two\\nlines")
def nan(label): return float("nan")
def secret(label): return float(label in os.environ)
def home(label): return float(os.getcwd() == os.environ["HOME"] and not os.listdir("."))
def dumpable(label):
    import ctypes
    return float(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
def torch(label): return float("torch" in sys.modules)
def write_everywhere(label):
    for file in map(int, os.listdir("/proc/self/fd")):
        try: os.write(file, label.encode() + b"\\n")
        except OSError: pass
    return 1.0
def answer_in_a_moment(label):
    def write():
        time.sleep(0.1)
        write_everywhere('{"outcomes": [{"value": 9.0, "score": null, "extra": {}}]}')
        open(label, "w").close()
    threading.Thread(target=write).start()
    return 1.0
def leave_in_a_moment(label):
    def leave():
        time.sleep(0.1)
        open(label, "w").close()
        os._exit(0)
    threading.Thread(target=leave).start()
    return 1.0
def talk(label):
    print("x" * 10**6)
    sys.stdin.read()
    os.write(1, b'{"outcomes": []}')
    return 1.0
"""
SETUP = Setup(functions={"f": {"path": "/nowhere/f.py", "source": SOURCE, "function": "reward_func"}})


def call(function: str, label: str = "") -> Call:
    return Call("function", {"queries": [function], "prompts": [""], "completions": [function], "labels": [label]}, "f")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    settings = SandboxSettings(workers=2, timeout_s=1.0, memory_mb=256, environment=("RLHF_TEST_SHOWN",))
    os.environ.update(RLHF_TEST_SHOWN="1", RLHF_TEST_HIDDEN="1")
    scratch = tmp_path_factory.mktemp("scratch")
    before = set(descendants(os.getpid()))  # what other tests of the session have started
    with Sandbox(settings, SETUP, scratch) as made:
        yield made
    del os.environ["RLHF_TEST_SHOWN"], os.environ["RLHF_TEST_HIDDEN"]
    assert not list(scratch.iterdir())
    # A killed driver's processes may be this session's by now, if another test had it adopt orphans: dead ones.
    assert not [pid for pid in set(descendants(os.getpid())) - before if _lives(pid)]


def run(sandbox: Sandbox, function: str, label: str = "") -> Outcome:
    return sandbox.run([call(function, label)])[0][0]


def test_a_score_of_zero_is_a_score(sandbox: Sandbox) -> None:
    assert sandbox.run([call("length", "four"), call("length", "")]) == [[Scored(4.0)], [Scored(0.0)]]


FORGED = '{"outcomes":[{"value":1.0,"score":null,"extra":{}}]}'
WROTE = "the called code wrote to the descriptor that answers go through"


@pytest.mark.parametrize("written", ["", "}", "[]", '{"outcomes": []}', FORGED, f"{FORGED}\n{FORGED}", '{"id": ""}'])
def test_what_is_written_between_the_answers_is_that_calls_failure(tmp_path: Path, written: str) -> None:
    """One process: no later call gets an earlier one's answer."""
    with Sandbox(SandboxSettings(workers=1), SETUP, tmp_path) as sandbox:
        found = sandbox.run([call("write_everywhere", written), call("length", "four"), call("length", "")])
    assert found == [[Failed("error", WROTE)], [Scored(4.0)], [Scored(0.0)]]


@pytest.mark.parametrize("function", ["answer_in_a_moment", "leave_in_a_moment"])
def test_what_an_earlier_call_does_later_is_no_call_s_answer(tmp_path: Path, function: str) -> None:
    done = tmp_path / "done"
    with Sandbox(SandboxSettings(workers=1), SETUP, tmp_path) as sandbox:
        assert run(sandbox, function, str(done)) == Scored(1.0)
        _wait(done.exists)
        time.sleep(0.2)  # for its end
        assert run(sandbox, "length", "four") == Scored(4.0)


# A response's program that looks for the answers' descriptor in the sandbox's process and in the driver,
# and writes to the former's alone: the latter's may be the test run's.
FORGE = f"""
import os
def parent(pid): return int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
opened = []
for pid in (os.getppid(), parent(os.getppid())):
    for name in ("mem", "environ", *(f"fd/{{number}}" for number in range(64))):
        try: file = os.open(f"/proc/{{pid}}/{{name}}", os.O_RDWR if name == "mem" else os.O_RDONLY)
        except OSError: continue
        opened.append((pid == os.getppid(), name))
        if opened[-1][0] and name != "environ" and os.readlink(f"/proc/self/fd/{{file}}").startswith("pipe:"):
            try: os.write(os.open(f"/proc/{{pid}}/{{name}}", os.O_WRONLY), {FORGED!r}.encode() + b"\\n")
            except OSError: pass
"""


def code(program: str, label: str) -> Call:
    given = {"completion": program, "label": label, "timeout_s": 5.0, "memory_mb": 512, "partial": False}
    return Call("code", given, limit_s=60)


def test_a_response_s_program_cannot_answer_for_the_sandbox(tmp_path: Path) -> None:
    with Sandbox(SandboxSettings(workers=1), SETUP, tmp_path) as sandbox:
        [[forged], [reached]] = sandbox.run(
            [
                code(FORGE, "assert False"),
                code(FORGE, "assert not [name for of_the_sandbox, name in opened if of_the_sandbox], opened"),
            ]
        )
    assert isinstance(forged, Scored)
    assert forged.value == 0.0
    assert isinstance(reached, Scored)
    assert reached.value == 1.0


@pytest.mark.parametrize(
    ("function", "reason", "message"),
    [
        ("hang", "timeout", "no answer within 1 s"),
        ("power", "timeout", "no answer within 1 s"),
        ("backtrack", "timeout", "no answer within 1 s"),
        ("memory", "memory", "more than 256 MB were resident"),
        ("memory_of_a_child", "memory", "more than 256 MB were resident"),
        ("allocate", "memory", "out of memory"),
        ("leave", "error", "the process ended with 3 during the call"),
        ("leave_politely", "error", "SystemExit: 0"),
        ("error", "error", r"KeyError: 'two\nlines'"),
        ("nan", "unparsable", "the value is nan, the score None"),
        ("absent", "error", "KeyError: 'absent'"),
    ],
)
def test_what_fails_has_a_name_and_the_next_call_an_answer(
    sandbox: Sandbox, function: str, reason: str, message: str
) -> None:
    found = sandbox.run([call(function), call("length", "a"), call("length", "ab"), call("length", "abc")])
    assert found == [[Failed(reason, message)], [Scored(1.0)], [Scored(2.0)], [Scored(3.0)]]  # type: ignore[arg-type]


def test_what_earlier_calls_left_in_memory_is_not_a_later_ones_fault(tmp_path: Path) -> None:
    settings = SandboxSettings(workers=1, memory_mb=256)
    with Sandbox(settings, SETUP, tmp_path) as sandbox:
        found = [run(sandbox, "keep", label) for label in ("150", "150", "400", "1")]
    failed = Failed("memory", "more than 256 MB were resident")
    assert found == [Scored(1.0), Scored(1.0), failed, Scored(1.0)]


def test_a_process_sees_what_it_is_allowed_to(sandbox: Sandbox) -> None:
    assert run(sandbox, "secret", "RLHF_TEST_SHOWN") == Scored(1.0)
    assert run(sandbox, "secret", "RLHF_TEST_HIDDEN") == Scored(0.0)
    assert run(sandbox, "home") == Scored(1.0)


def test_a_process_refuses_tracing(sandbox: Sandbox) -> None:
    """What keeps an ordinary user's programs out of /proc/PID/mem; root's are kept out by having no capability."""
    assert run(sandbox, "dumpable") == Scored(0.0)


def test_a_process_loads_no_torch(sandbox: Sandbox) -> None:
    assert run(sandbox, "torch") == Scored(0.0)


def test_what_a_function_prints_is_no_answer(sandbox: Sandbox) -> None:
    assert run(sandbox, "talk") == Scored(1.0)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("import sys\nsys.exit(1)", "SystemExit: 1"),
        ("def other(a, b): return 1.0", "has no function reward_func; define it"),
        ("def reward_func(query): return 1.0", r"reward_func takes \(query\); give \(queries, prompts, labels\)"),
        ("async def reward_func(a, b): return 1.0", "not async"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path, source: str, fault: str) -> None:
    setup = Setup(functions={"f": {"path": "/nowhere/f.py", "source": source, "function": "reward_func"}})
    with pytest.raises(SettingsError, match=f"a reward function cannot be loaded: .*{fault}"):
        Sandbox(SandboxSettings(workers=1), setup, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "limit_s", "fault"),
    [
        ("import time\ntime.sleep(99)", 0.5, "timeout: no answer within"),
        ("import os\nos.write(4, b'{}\\n')", 120, "error: the called code wrote to the descriptor"),
    ],
)
def test_a_start_without_an_answer_is_an_error(tmp_path: Path, source: str, limit_s: float, fault: str) -> None:
    setup = Setup(functions={"f": {"path": "/nowhere/f.py", "source": source, "function": "reward_func"}})
    with pytest.raises(SettingsError, match=f"did not start: {fault}"):
        Sandbox(SandboxSettings(workers=1, start_timeout_s=limit_s), setup, tmp_path)
    assert not list(tmp_path.iterdir())


def test_closing_ends_a_call_and_answers_those_that_wait(tmp_path: Path) -> None:
    sandbox = Sandbox(SandboxSettings(workers=1, timeout_s=60), SETUP, tmp_path)
    waiting = [sandbox.submit(call("hang")) for _ in range(3)]
    sandbox.close()
    messages = [future.result()[0] for future in waiting]
    assert {one.reason for one in messages if isinstance(one, Failed)} == {"error"}
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.submit(call("length"))


def test_processes_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from rlhf_core.config.rewards import SandboxSettings
from rlhf_core.rollout.sandbox import Call, Sandbox, Setup
sandbox = Sandbox(SandboxSettings(workers=2, timeout_s=60), Setup({dict(SETUP.functions)!r}), Path({str(tmp_path)!r}))
arguments = dict(queries=["begin_and_hang"], prompts=[""], completions=[""], labels=[{str(tmp_path / "begun")!r}])
waiting = sandbox.submit(Call("function", arguments, "f"))
time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-c", script])
    _wait(lambda: (tmp_path / "begun").exists())
    processes = descendants(driver.pid)
    assert len(processes) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _wait(lambda: not any(_lives(pid) for pid in processes))


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
