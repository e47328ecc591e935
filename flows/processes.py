"""Linux processes: who descends from whom, since when a pid means the same process, and how to end a whole tree."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessId:
    """A process for good: pids are given again, a pid with its start time (clock ticks since boot) is not."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Stat:
    pid: int
    parent: int
    state: str
    started: int


def identify(pid: int) -> ProcessId | None:
    """The process that has `pid` now, or None when there is none or only its unreaped remains."""
    stat = _read_stat(pid)
    return None if stat is None or stat.state in "ZX" else ProcessId(pid, stat.started)


def alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def descendants(root: int) -> list[ProcessId]:
    """Every living descendant of pid `root`, in whatever session or group it is; children before grandchildren."""
    children: dict[int, list[_Stat]] = {}
    for stat in _all_stats():
        children.setdefault(stat.parent, []).append(stat)
    found: list[ProcessId] = []
    queue = [root]
    for parent in queue:
        for stat in children.get(parent, []):
            queue.append(stat.pid)
            if stat.state not in "ZX":
                found.append(ProcessId(stat.pid, stat.started))
    return found


def send_signal(process: ProcessId, number: int) -> None:
    """Signal `process` if it still lives."""
    if alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def end_processes(processes: Iterable[ProcessId], grace_s: float) -> None:
    """SIGTERM, `grace_s` seconds to leave, SIGKILL; returns when all are gone."""
    remaining = list(processes)
    for process in remaining:
        send_signal(process, signal.SIGTERM)
    remaining = wait_gone(remaining, grace_s)
    for process in remaining:
        send_signal(process, signal.SIGKILL)
    wait_gone(remaining, 5.0)


def end_descendants(root: int, grace_s: float, keep: Iterable[ProcessId] = ()) -> None:
    """End all descendants of pid `root` but `keep`, and those that they start meanwhile.

    Call it where `root` is a subreaper: a process whose parent is ended first then stays a descendant.
    """
    kept = set(keep)
    grace = grace_s
    for _ in range(20):
        found = [process for process in descendants(root) if process not in kept]
        if not found:
            return
        end_processes(found, grace)
        grace = 0.0


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until all have ended, at most `timeout_s` seconds; returns those that live."""
    deadline = time.monotonic() + timeout_s
    remaining = list(processes)
    while True:
        remaining = [process for process in remaining if alive(process)]
        _reap(processes)
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.02)


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, instead of leaving for pid 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send this process signal `number` when the thread that started it ends.

    `parent` is the pid it was started by: when that has gone already, the signal would never come.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextmanager
def default_signals() -> Iterator[None]:
    """Children started inside get default SIGINT and SIGTERM.

    A shell's `command &` ignores SIGINT, ignored signals pass through exec, and a worker started so cannot be stopped.
    Main thread only.
    """
    changed = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def _reap(processes: Iterable[ProcessId]) -> None:
    for process in processes:
        stat = _read_stat(process.pid)
        if stat is not None and stat.state == "Z" and stat.parent == os.getpid():
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _all_stats() -> Iterator[_Stat]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read_stat(int(entry))) is not None:
            yield stat


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in parentheses may hold spaces and parentheses itself: fields are counted from the last one.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid=pid, state=fields[0], parent=int(fields[1]), started=int(fields[19]))
