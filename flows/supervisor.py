"""Runs a stage's driver: keeps its whole output, reads its events, and lets nothing that it started outlive it.

Free of torch and of Prefect. The caller says what to do with events and when to stop.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flows import guardian
from flows.processes import become_subreaper, descendants, end_descendants
from rlhf_core.cluster.leftovers import ATTEMPT, attempt_name

LINES_PER_SECOND = 20
POLL_S = 0.2
WATCH_S = 3.0
DRIVER = "driver"  # the role in the driver's own error events


class StageFailed(Exception):
    """The driver failed. The message is one line: the first cause, with the role and rank that it came from."""


class StageStopped(Exception):
    """The driver was ended because the watchdog said so: the run is cancelled, or the lease is lost."""


@dataclass(frozen=True)
class Watch:
    """What the supervisor calls: `event` for each event of the driver, `line` for each line of output that passes the
    limit, `stop` every few seconds from a thread of its own (a reason, or None to go on)."""

    event: Callable[[dict[str, Any]], None]
    line: Callable[[str], None]
    stop: Callable[[], str | None]


def supervise(
    command: Sequence[str],
    *,
    scratch: Path,
    watch: Watch,
    environment: Mapping[str, str] | None = None,
    watch_every_s: float = WATCH_S,
) -> None:
    """Run `command` to its end. Call it from a thread that outlives the driver: the kernel ends the driver with it.

    scratch: the attempt's directory. The driver writes events.jsonl there (what is in it before is skipped), its whole
    output is appended to driver.log, and when it has ended nothing else is left there but spec.json.

    Raises StageFailed when the command fails, StageStopped when `watch.stop` gave a reason; whatever else is raised
    here (Prefect's TerminationSignal) passes through. In every case all descendants have ended when it returns.
    """
    become_subreaper()
    before = descendants(os.getpid())
    tail = EventTail(scratch / guardian.EVENTS)
    variables = dict(os.environ if environment is None else environment) | {ATTEMPT: attempt_name(scratch)}
    with (scratch / guardian.LOG).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.guardian", str(os.getpid()), str(scratch), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        pump = OutputPump(_pipe(process), output, watch.line)
        watchdog = Watchdog(process, watch.stop, watch_every_s)
        pump.start()
        watchdog.start()
        try:
            while process.poll() is None:
                tail.deliver(watch.event)
                time.sleep(POLL_S)
        finally:
            watchdog.finish()
            _end(process)
            end_descendants(os.getpid(), 0.0, keep=before)
            # Done already, unless the guardian was killed.
            guardian.remove_files(scratch)
            pump.join(timeout=5.0)
        tail.deliver(watch.event)
    if watchdog.reason is not None:
        raise StageStopped(watchdog.reason)
    if process.returncode != 0:
        # Negative: the guardian itself was killed, and the driver with it.
        code = process.returncode if process.returncode > 0 else 128 - process.returncode
        raise StageFailed(failure(code, tail.cause, pump.last_line))


def attempt_scratch(scratch: str, node: str, key: str, flow_run: str, run_count: int) -> Path:
    """The directory of one attempt on this machine: its spec, driver.log and events.jsonl."""
    return Path(scratch).absolute() / f"{node}-{key[:12]}" / attempt_label(flow_run, run_count)


def attempt_label(flow_run: str, run_count: int) -> str:
    """Tells the attempts at one key apart. The first digits of a run's id do not: they are the time (UUID 7)."""
    return f"{flow_run[-8:]}-{run_count}"


def failure(code: int, error: Mapping[str, Any] | None, last_line: str) -> str:
    """One line for a driver that ended with `code`: the error event that gives the cause, else its exit and last words.

    The driver's own ClusterError names the rank and what it raised.
    """
    if error is not None:
        if error["role"] == DRIVER and error["kind"] == "ClusterError":
            return error["message"]
        return f"{origin(error)}: {error['kind']}: {error['message']}"
    ended = f"signal {signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"
    return f"the driver ended with {ended} and wrote no error; its last line: {last_line or '(none)'}"


def origin(error: Mapping[str, Any]) -> str:
    """Who wrote an error event: `policy rank 1`, `driver`."""
    return error["role"] if error["rank"] is None else f"{error['role']} rank {error['rank']}"


class EventTail:
    """Follows an events.jsonl, from its present end unless `from_start`; `cause` is the error since then to be shown.

    That is the driver's last, which knows what came first among the ranks: where one is killed, another writes that it
    lost it. Without one of the driver's it is the first.
    """

    def __init__(self, path: Path, *, from_start: bool = False):
        self.path = path
        self.cause: dict[str, Any] | None = None
        self._offset = path.stat().st_size if path.exists() and not from_start else 0

    def deliver(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call `callback` for each whole line that has come since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            if event["type"] == "error" and (self.cause is None or event["role"] == DRIVER):
                self.cause = event
            callback(event)


class OutputPump(threading.Thread):
    """Copies the driver's output: all of it to `output`, at most LINES_PER_SECOND lines to `line`."""

    def __init__(
        self,
        source: IO[bytes],
        output: IO[bytes],
        line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name="driver-output", daemon=True)
        self.last_line = ""
        self._source = source
        self._output = output
        self._line = line
        self._passed: deque[float] = deque(maxlen=LINES_PER_SECOND)
        self._left_out = 0
        self._clock = clock

    def run(self) -> None:
        for raw in self._source:
            self._output.write(raw)
            self._output.flush()
            # Progress bars redraw a line with carriage returns: what a terminal would show at last is what counts.
            text = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
            if text:
                self.last_line = text
                self._pass(text)
        self._report()

    def _pass(self, text: str) -> None:
        now = self._clock()
        if len(self._passed) == LINES_PER_SECOND and now - self._passed[0] < 1.0:
            self._left_out += 1
            return
        self._report()
        self._passed.append(now)
        self._line(text)

    def _report(self) -> None:
        if self._left_out:
            self._line(f"({self._left_out} lines left out here; the log file has all)")
            self._left_out = 0


class Watchdog(threading.Thread):
    """Asks `stop` every few seconds, and ends the driver when there is a reason to.

    A thread of its own: a cancellation that the worker does not deliver (its connection was lost once) must work even
    while the main thread waits for the server.
    """

    def __init__(self, process: subprocess.Popen[bytes], stop: Callable[[], str | None], every_s: float):
        super().__init__(name="watchdog", daemon=True)
        self.reason: str | None = None
        self._process = process
        self._stop = stop
        self._every_s = every_s
        self._finished = threading.Event()

    def run(self) -> None:
        while not self._finished.wait(self._every_s):
            reason = self._stop()
            if reason is not None and not self._finished.is_set():
                self.reason = reason
                self._process.terminate()
                return

    def finish(self) -> None:
        self._finished.set()


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise RuntimeError("the driver was started without a pipe for its output")
    return process.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the guardian end all that it guards; what it leaves falls to this process, the next subreaper."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(guardian.GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
