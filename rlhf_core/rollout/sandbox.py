"""Warm processes in which functions run that a response could stall, with limits that the called code cannot lift.

Each process belongs to one thread of the driver, which starts it, waits for its answers with a deadline, and ends and
replaces it. Processes are started by exec, never forked from the driver, and end with the driver, however that ends.

A call and its answer go over a socket, which unlike a pipe nobody can open by way of /proc/PID/fd. An answer repeats
the random id of its call; anything else that comes back is the called code's, fails the call and ends the process.

Memory is watched as what is resident, by reading /proc while waiting: a limit on address space (RLIMIT_AS) would refuse
libraries such as torch, which reserve far more than they use.
"""

import json
import os
import queue
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import SandboxSettings
from rlhf_core.rollout.outcomes import Failed, Outcome, Reason, Scored, one_line
from rlhf_core.rollout.process_tree import end_tree, resident_bytes

# What a process sees of the driver's environment. No token and no key is among them.
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_POLL_S = 0.02  # between two looks at a call's memory
_ANSWER_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Call:
    """kind: `function` or a verifier, see sandbox_worker. size: outcomes that are due. limit_s: None for the pool's."""

    kind: str
    arguments: Mapping[str, Any]
    name: str = ""
    size: int = 1
    limit_s: float | None = None

    def message(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "size": self.size, "arguments": self.arguments}


@dataclass(frozen=True)
class Setup:
    """What a process loads before its first call. functions: name -> {path, source, function}; modules to import."""

    functions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    modules: Sequence[str] = ()


class Sandbox:
    """`settings.workers` processes. To be closed; what was not answered then fails."""

    def __init__(self, settings: SandboxSettings, setup: Setup, scratch: Path | None = None):
        """scratch: where the processes' working directories are made, the system's place for them by default.

        Returns once every process has loaded what it needs. Raises SettingsError for a function that cannot be loaded.
        """
        self._calls: queue.SimpleQueue[tuple[Call, Future[list[Outcome]]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._directory = tempfile.TemporaryDirectory(prefix="sandbox-", dir=scratch, ignore_cleanup_errors=True)
        started: list[Future[None]] = [Future() for _ in range(settings.workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(settings, setup, one), daemon=True, name=f"sandbox-{number}")
            for number, one in enumerate(started)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for one in started:
                one.result()
        except BaseException:
            self.close()
            raise

    def submit(self, call: Call) -> "Future[list[Outcome]]":
        """The call's outcomes, one for each response. They never raise; failures are among them."""
        future: Future[list[Outcome]] = Future()
        if self._closing.is_set():
            raise RuntimeError("the sandbox is closed")
        self._calls.put((call, future))
        return future

    def run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
        return [future.result() for future in [self.submit(call) for call in calls]]

    def close(self) -> None:
        """Ends all processes, those in a call too."""
        self._closing.set()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        while not self._calls.empty():
            if (left := self._calls.get()) is not None:
                left[1].set_result([Failed("error", "the sandbox was closed")] * left[0].size)
        self._directory.cleanup()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, settings: SandboxSettings, setup: Setup, started: "Future[None]") -> None:
        """A thread's life: its process has to end with it."""
        worker = _Worker(settings, setup, Path(self._directory.name), self._closing)
        try:
            worker.start()
            started.set_result(None)
        except BaseException as error:  # noqa: BLE001  handed to whoever made the pool
            worker.end()
            started.set_exception(error)
            return
        while (given := self._calls.get()) is not None:
            call, future = given
            try:
                future.set_result(worker.answer(call))
            except BaseException as error:  # noqa: BLE001  a fault of ours, for whoever waits
                future.set_exception(error)
                worker.end()
        worker.end()


class _Gone(Exception):
    """The process did not answer; it is to be ended."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.failure = Failed(reason, message)


class _Worker:
    """One process and its socket, used by one thread."""

    def __init__(self, settings: SandboxSettings, setup: Setup, directory: Path, closing: threading.Event):
        self._settings, self._setup, self._directory, self._closing = settings, setup, directory, closing
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._unread = b""
        self._answered = 0  # calls, by this process

    def start(self) -> None:
        """Raises SettingsError where the process cannot load what the setup names."""
        self._home = tempfile.TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True)
        command = [sys.executable, "-P", "-m", "rlhf_core.rollout.sandbox_worker", str(os.getpid())]
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        with its_end:
            self._process = subprocess.Popen(
                command,
                stdin=its_end.fileno(),
                stdout=its_end.fileno(),
                cwd=self._home.name,
                env=self._environment(self._home.name),
                start_new_session=True,
            )
        self._unread, self._answered = b"", 0
        setup = {"functions": dict(self._setup.functions), "modules": list(self._setup.modules)}
        limit = self._settings.start_timeout_s
        try:
            answer = self._exchange(setup, limit)
        except _Gone as gone:
            self.end()
            raise SettingsError(
                f"a process of reward.sandbox did not start: {gone.failure.reason}: {gone}; see its output"
            ) from None
        if "ready" not in answer:
            self.end()
            raise SettingsError(f"a reward function cannot be loaded: {answer.get('error')}")

    def answer(self, call: Call) -> list[Outcome]:
        """In a new process where the first one held too much memory and had answered before: what earlier calls left
        there is not this one's fault."""
        try:
            return self._answer(call)
        except _Gone as gone:
            again = gone.failure.reason == "memory" and self._answered > 0
            self.end()
            return self.answer(call) if again else [gone.failure] * call.size

    def _answer(self, call: Call) -> list[Outcome]:
        if self._process is not None and not self._waits():
            self.end()
        if self._process is None:
            try:
                self.start()
            except SettingsError as error:
                return [Failed("error", str(error))] * call.size
        limit = self._settings.timeout_s if call.limit_s is None else call.limit_s
        answer = self._exchange(call.message(), limit)
        try:
            outcomes = [_decoded(one) for one in answer["outcomes"]]
        except (KeyError, TypeError):
            outcomes = []
        if len(outcomes) != call.size:
            raise _Gone("error", f"the process gave no {call.size} outcomes")
        self._answered += 1
        return outcomes

    def end(self) -> None:
        if self._process is not None:
            end_tree(self._process.pid)
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._home is not None:
            self._home.cleanup()
            self._home = None

    def _environment(self, home: str) -> dict[str, str]:
        names = (*INHERITED, *self._settings.environment)
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        fixed = {"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
        return inherited | fixed

    def _waits(self) -> bool:
        """Whether the process has neither ended nor sent what no call asked for, as a thread of an earlier call may."""
        assert self._socket is not None
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        return False

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends a line and waits for one. Raises _Gone after limit_s seconds, for too much memory, for a process that
        ended or was to, and for what is not the message's answer or comes with it."""
        assert self._socket is not None
        deadline = time.monotonic() + limit_s
        call_id = secrets.token_hex(16)
        unsent = memoryview(json.dumps({"id": call_id, **message}).encode() + b"\n")
        self._unread = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while b"\n" not in self._unread:
                events = [mask for _, mask in ready.select(_POLL_S)]
                if unsent and any(mask & selectors.EVENT_WRITE for mask in events):
                    unsent = unsent[self._send(self._socket, unsent) :]
                    if not unsent:
                        ready.modify(self._socket, selectors.EVENT_READ)
                if any(mask & selectors.EVENT_READ for mask in events):
                    self._receive(self._socket)
                self._check_limits(deadline, limit_s)
        line, _, after = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if after or not isinstance(answer, dict) or answer.get("id") != call_id:
            raise _Gone("error", "the called code wrote to the descriptor that answers go through")
        return answer

    def _send(self, channel: socket.socket, message: memoryview) -> int:
        try:
            return channel.send(message)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None

    def _receive(self, channel: socket.socket) -> None:
        try:
            part = channel.recv(2**16)
        except ConnectionResetError:  # it ended with some of the message unread
            part = b""
        if not part:
            raise self._ended()
        self._unread += part
        if len(self._unread) > _ANSWER_BYTES:
            raise _Gone("error", f"the answer is longer than {_ANSWER_BYTES} bytes")

    def _ended(self) -> _Gone:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return _Gone("error", f"the process ended with {self._process.returncode} during the call")

    def _check_limits(self, deadline: float, limit_s: float) -> None:
        """An answer that has come counts, whenever it is looked at."""
        assert self._process is not None
        if b"\n" in self._unread:
            return
        if self._closing.is_set():
            raise _Gone("error", "the sandbox was closed during the call")
        if time.monotonic() >= deadline:
            raise _Gone("timeout", f"no answer within {limit_s:g} s")
        if resident_bytes(self._process.pid) > self._settings.memory_mb * 2**20:
            raise _Gone("memory", f"more than {self._settings.memory_mb} MB were resident")


def _decoded(outcome: Mapping[str, Any]) -> Outcome:
    return Failed(outcome["reason"], one_line(outcome["message"])) if "reason" in outcome else Scored(**outcome)
