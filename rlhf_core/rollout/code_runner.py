"""The verifier `code`: a response's program against the tests in the label, each in a fresh interpreter.

Runs in the sandbox. A test that takes too long, too much memory or an early exit is a failed test and is counted as
such: here the response is at fault. A program has no capability and cannot reach the sandbox's process, but it is the
same user: who samples hostile code runs the stage in a container without secrets and without a network.
"""

import ast
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.rollout.outcomes import Outcome, Scored, one_line
from rlhf_core.rollout.privileges import drop_capabilities
from rlhf_core.rollout.process_tree import descendants, end_new_children, end_with_parent
from rlhf_core.rollout.verifiers import fenced_blocks

_OUTPUT_BYTES = 16 * 2**20  # of a program's output; a longer one fails to write


@dataclass(frozen=True)
class Checks:
    """Either programs that raise where the response is wrong, or (input, expected output) of the whole program."""

    programs: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.programs) + len(self.cases)


def read_tests(label: str) -> Checks:
    """Of a label: JSON {"inputs": [...], "outputs": [...]}, a JSON list of Python tests, or Python.

    Raises ValueError for what is none of them.
    """
    try:
        given = json.loads(label)
    except json.JSONDecodeError:
        given = [label]
    if isinstance(given, dict) and set(given) >= {"inputs", "outputs"}:
        cases = tuple(zip(_texts(given["inputs"]), _texts(given["outputs"]), strict=True))
        if cases:
            return Checks(cases=cases)
    if isinstance(given, list):
        programs = _texts(given)
        for program in programs:
            ast.parse(program)
        if any(program.strip() for program in programs):
            return Checks(programs=programs)
    raise ValueError(
        f"the label {one_line(label, 80)!r} holds no tests; give Python, a JSON list of Python tests, or JSON with "
        "`inputs` and `outputs`"
    )


def _texts(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"tests are {one_line(repr(given), 80)}; give a list of strings")
    return tuple(given)


def extract_code(completion: str) -> str:
    """The last fenced block of Python or without a language; all of a completion without one."""
    blocks = fenced_blocks(completion, {"", "python", "python3", "py"})
    return blocks[-1] if blocks else completion


def run_tests(completion: str, label: str, *, timeout_s: float, memory_mb: int, partial: bool) -> Outcome:
    """1.0 if all tests pass, else 0.0; partial: the share that passes. Without it the first failure ends the run.

    extra: passed (share of the tests), timeout, memory and unparsable (1 where that happened to a test).
    """
    tests, code = read_tests(label), extract_code(completion)
    extra = {"passed": 0.0, "timeout": 0.0, "memory": 0.0, "unparsable": 0.0}
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Scored(0.0, extra=extra | {"unparsable": 1.0})
    passed = 0
    for number in range(len(tests)):
        with tempfile.TemporaryDirectory(dir=os.getcwd()) as directory:
            result = _run(Path(directory), code, tests, number, timeout_s, memory_mb)
        passed += result == "passed"
        if result in extra:
            extra[result] = 1.0
        if result != "passed" and not partial:
            break
    extra["passed"] = passed / len(tests)
    return Scored(extra["passed"] if partial else float(passed == len(tests)), extra=extra)


# Reads the word that says "all was run" once it was: an early exit of the response's code does not pass. Both files are
# read before either runs: the response's code could write the other.
_HARNESS = """\
import os, sys
def run():
    scope, programs = {"__name__": "solution"}, []
    for name in ("solution.py", "test.py"):
        with open(name, encoding="utf-8") as file:
            programs.append(compile(file.read(), name, "exec"))
    for program in programs:
        exec(program, scope)
run()
os.write(int(sys.argv[2]), os.read(int(sys.argv[1]), 64))
"""


def _run(directory: Path, code: str, tests: Checks, number: int, timeout_s: float, memory_mb: int) -> str:
    """passed, failed, timeout or memory."""
    (directory / "solution.py").write_text(code, encoding="utf-8", errors="replace")
    if tests.cases:
        given, expected = tests.cases[number]
        ended = _execute(directory, [sys.executable, "-I", "solution.py"], given, timeout_s, memory_mb)
        right = ended == 0 and _same_output(_output(directory), expected)
        return _verdict(ended, right, directory)
    (directory / "test.py").write_text(tests.programs[number], encoding="utf-8", errors="replace")
    word = secrets.token_hex(16).encode()
    (there_out, there_in), (back_out, back_in) = os.pipe(), os.pipe()
    try:
        os.write(there_in, word)
        command = [sys.executable, "-I", "-c", _HARNESS, str(there_out), str(back_in)]
        ended = _execute(directory, command, "", timeout_s, memory_mb, (there_out, back_in))
        os.set_blocking(back_out, False)
        with suppress(BlockingIOError):
            return _verdict(ended, ended == 0 and os.read(back_out, 64) == word, directory)
        return _verdict(ended, False, directory)
    finally:
        for end in (there_out, there_in, back_out, back_in):
            os.close(end)


def _verdict(ended: int | None, right: bool, directory: Path) -> str:
    if ended is None:
        return "timeout"
    if right:
        return "passed"
    said = _tail(directory / "stderr")
    # What Python says of a failed allocation, and of one in an import.
    return "memory" if ended == 1 and said.startswith("MemoryError") else "failed"


def _execute(
    directory: Path, command: Sequence[str], given: str, timeout_s: float, memory_mb: int, fds: Sequence[int] = ()
) -> int | None:
    """The exit code, None after timeout_s seconds. Nothing that the program started lives on."""
    (directory / "stdin").write_text(given, encoding="utf-8")

    limits = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_FSIZE: _OUTPUT_BYTES,
        resource.RLIMIT_CORE: 0,
    }

    def limit() -> None:
        for what, most in limits.items():
            resource.setrlimit(what, (most, most))
        drop_capabilities()
        end_with_parent(signal.SIGKILL)

    with (
        open(directory / "stdin", "rb") as stdin,
        open(directory / "stdout", "wb") as out,
        open(directory / "stderr", "wb") as err,
    ):
        before = set(descendants(os.getpid()))
        # The sandbox's process has one thread unless the user's function started others.
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=stdin,
            stdout=out,
            stderr=err,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=limit,
            env={"PATH": os.environ.get("PATH", os.defpath), "OMP_NUM_THREADS": "1", "HOME": str(directory)},
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()
            end_new_children(before)


def _output(directory: Path) -> str:
    return (directory / "stdout").read_text(encoding="utf-8", errors="replace")


def _same_output(found: str, expected: str) -> bool:
    """Line by line; blanks at the ends of lines and blank lines at the end do not count."""
    return [line.rstrip() for line in found.rstrip().split("\n")] == [
        line.rstrip() for line in expected.rstrip().split("\n")
    ]


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")
    return lines[2]
