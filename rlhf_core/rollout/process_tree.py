"""Ending a process with all that descends from it, and how much memory they hold. Linux."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ROUNDS = 100  # of looking for what was started meanwhile


def end_with_parent(number: int) -> None:
    """The kernel sends this process the signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ends become this process's children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Children before grandchildren."""
    found = _children(pid)
    for one in found:
        found += _children(one)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def resident_bytes(pid: int) -> int:
    """Of a process and its descendants; pages that they share count for each."""
    total = 0
    for one in (pid, *descendants(pid)):
        with suppress(OSError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE
    return total


def end_tree(pid: int) -> None:
    """SIGKILL to `pid` and its descendants, all stopped first so that none starts another. `pid` is not reaped."""
    stopped: list[int] = []
    for _ in range(_ROUNDS):
        new = [one for one in (pid, *descendants(pid)) if one not in stopped]
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped += new
    _signal(stopped[::-1], signal.SIGKILL)


def end_new_children(before: set[int]) -> None:
    """Ends and reaps this process's descendants but those in `before`. For a process that adopts orphans."""
    for _ in range(_ROUNDS):
        new = [one for one in descendants(os.getpid()) if one not in before]
        if not new:
            return
        _signal(new, signal.SIGKILL)
        for one in new:
            with suppress(ChildProcessError):  # not ours yet: its own parent lives
                os.waitpid(one, os.WNOHANG)
        time.sleep(0.001)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
