"""Programs against tests: what passes, what does not, and that none reaches what it should not."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.rollout.code_runner import extract_code, read_tests, run_tests
from rlhf_core.rollout.outcomes import Scored

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
RIGHT, WRONG = "assert add(1, 2) == 3", "assert add(1, 2) == 4"


def run(completion: str, label: str, *, partial: bool = False, timeout_s: float = 5.0) -> Scored:
    found = run_tests(completion, label, timeout_s=timeout_s, memory_mb=512, partial=partial)
    assert isinstance(found, Scored)
    return found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("label", "value"),
    [(RIGHT, 1.0), (WRONG, 0.0), (f"{RIGHT}\n{WRONG}", 0.0), (json.dumps([RIGHT, RIGHT]), 1.0)],
)
def test_python_tests(label: str, value: float) -> None:
    assert run(ADD, label).value == value


def test_a_share_of_the_tests() -> None:
    label = json.dumps([WRONG, RIGHT, WRONG, RIGHT])
    assert run(ADD, label, partial=True).value == 0.5
    assert run(ADD, label, partial=False).value == 0.0


@pytest.mark.parametrize(("output", "value"), [("3", 1.0), ("3\n\n", 1.0), ("4", 0.0)])
def test_input_and_output(output: str, value: float) -> None:
    program = "if __name__ == '__main__':\n    print(sum(map(int, input().split())))"
    assert run(program, json.dumps({"inputs": ["1 2\n"], "outputs": [output]})).value == value


@pytest.mark.parametrize("program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_an_early_exit_passes_nothing(program: str) -> None:
    assert run(program, "assert False").value == 0.0


def test_a_program_that_writes_over_its_tests_passes_nothing() -> None:
    assert run("open('test.py', 'w').write('pass')", "assert False").value == 0.0


def test_a_program_has_no_capability() -> None:
    """Nor can it get one: the bounding set (CapBnd, see proc(5)) is empty for root, and new privileges are off."""
    program = "import os\nsaid = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines())"
    label = (
        "assert not any(int(said[name], 16) for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb')), said\n"
        "assert os.getuid() or not int(said['CapBnd'], 16), said\nassert said['NoNewPrivs'] == '1'"
    )
    assert run(program, label).value == 1.0


@pytest.mark.parametrize(
    ("program", "happened"),
    [("while True: pass", "timeout"), ("x = bytearray(10**10)", "memory"), ("def f(:", "unparsable")],
)
def test_what_happened_is_counted(program: str, happened: str) -> None:
    extra = run(program, "pass", timeout_s=0.3).extra
    assert {name for name, value in extra.items() if value} == {happened}


def test_a_program_sees_no_secret_and_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token")
    left = home.parent / "left"
    program = f"import os\nopen({str(left)!r}, 'w').write(repr(dict(os.environ)) + os.getcwd())"
    assert run(program, "pass").value == 1.0
    assert "a-token" not in left.read_text()
    assert str(home) in left.read_text()
    assert not list(home.iterdir())


def test_processes_of_a_program_end_with_it(home: Path) -> None:
    """In a process of its own, which adopts orphans as the sandbox's do."""
    program = (
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(100)\n    os._exit(0)"
    )
    script = (
        "import os, time\nfrom rlhf_core.rollout.code_runner import run_tests\n"
        "from rlhf_core.rollout.process_tree import adopt_orphans, descendants\nadopt_orphans()\n"
        f"print(run_tests({program!r}, 'pass', timeout_s=5, memory_mb=512, partial=False).value, "
        "descendants(os.getpid()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=home, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0 []\n"


def test_the_last_fenced_block_is_the_code() -> None:
    assert extract_code("```py\na\n```\n```sh\nrm\n```\n```\nb\n```") == "b\n"
    assert extract_code("a = 1") == "a = 1"


@pytest.mark.parametrize("label", ["", "[]", "7 +", '{"inputs": [], "outputs": []}', "[1]", '{"inputs": ["1"]}'])
def test_a_label_without_tests_is_refused(label: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        read_tests(label)


def test_a_test_that_sleeps_ends_in_time() -> None:
    started = time.monotonic()
    assert run("import time\ntime.sleep(60)", "pass", timeout_s=0.2).extra["timeout"] == 1.0
    assert time.monotonic() - started < 30
