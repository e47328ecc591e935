"""Who may train a stage: numbered leases, of which the highest counts.

training/<stage>/<key>/lease/<n>.json is created conditionally. An expired or released lease is taken over by creating
n+1, so two runs that want one stage train it once. Expiry compares the clocks of two machines: they must agree well
within the time to live.
"""

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_core.store.backends import StoreError
from rlhf_core.store.store import Store

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6})\.json")

Clock = Callable[[], float]


@dataclass(frozen=True)
class LeaseState:
    """One lease file, as read. `heartbeat`: unix seconds of the last renewal. `token` tells two writers of one number
    apart.
    """

    n: int
    owner: dict[str, Any]
    heartbeat: float
    ttl_s: float
    released: bool
    token: str
    alive: bool
    """Neither released nor expired when it was read."""


class LeaseHeld(Exception):
    """Another owner holds the lease. `owner` as it named itself, `age`: seconds since its last heartbeat."""

    def __init__(self, message: str, owner: dict[str, Any], age: float):
        super().__init__(message)
        self.owner = owner
        self.age = age

    def __reduce__(self) -> tuple[type["LeaseHeld"], tuple[str, dict[str, Any], float]]:
        return LeaseHeld, (str(self), self.owner, self.age)


class LeaseLost(Exception):
    """The lease was taken over, released or deleted: its former holder must neither save nor publish."""


def _directory(stage: str, key: str) -> str:
    return f"training/{stage}/{key}/lease"


def _path(stage: str, key: str, n: int) -> str:
    return f"{_directory(stage, key)}/{n:06d}.json"


def _highest(store: Store, stage: str, key: str) -> int:
    """0 when there is none."""
    matches = (_NAME.fullmatch(name) for name in store.list_names(_directory(stage, key)))
    return max((int(match[1]) for match in matches if match), default=0)


def _encode(owner: dict[str, Any], heartbeat: float, ttl_s: float, released: bool, token: str) -> bytes:
    content = {"owner": owner, "heartbeat": heartbeat, "ttl_s": ttl_s, "released": released, "token": token}
    return json.dumps(content, indent=2, sort_keys=True).encode()


def _read(store: Store, stage: str, key: str, n: int, now: float) -> LeaseState:
    path = _path(stage, key, n)
    try:
        content = json.loads(store.read_bytes(path))
        heartbeat, ttl_s, released = float(content["heartbeat"]), float(content["ttl_s"]), bool(content["released"])
        return LeaseState(
            n=n,
            owner=dict(content["owner"]),
            heartbeat=heartbeat,
            ttl_s=ttl_s,
            released=released,
            token=str(content["token"]),
            alive=not released and now - heartbeat < ttl_s,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} in store {store.url!r} is not a lease ({error}); delete it when no run is alive"
        ) from error


class Lease:
    """A held lease. Made by `acquire`, or by `attach` in a process that was handed the number."""

    def __init__(self, store: Store, stage: str, key: str, state: LeaseState, clock: Clock):
        self.store = store
        self.stage = stage
        self.key = key
        self.n = state.n
        self.owner = state.owner
        self.ttl_s = state.ttl_s
        self._token = state.token
        self._clock = clock
        self._lost: LeaseLost | None = None
        # Else a renewal under way on keep_alive's thread could undo a release.
        self._writing = threading.Lock()

    def check(self) -> None:
        """Raises LeaseLost unless this lease is the highest, unreleased and ours."""
        if self._lost is not None:
            raise self._lost
        where = f"lease {self.n} on {self.stage}/{self.key[:12]}"
        highest = _highest(self.store, self.stage, self.key)
        if highest > self.n:
            taker = _read(self.store, self.stage, self.key, highest, self._clock())
            self._lose(f"{where} was taken over by {taker.owner} (lease {highest})")
        try:
            state = _read(self.store, self.stage, self.key, self.n, self._clock())
        except FileNotFoundError:
            self._lose(f"{where} was deleted")
            return
        if state.token != self._token:
            self._lose(f"{where} was overwritten by {state.owner}")
        if state.released:
            self._lose(f"{where} was released")

    def _lose(self, message: str) -> None:
        self._lost = LeaseLost(f"{message}; this run must not save or publish")
        raise self._lost

    def renew(self) -> None:
        """Sets the heartbeat to now. Raises LeaseLost as `check` does."""
        with self._writing:
            self.check()
            self._write(released=False)

    def release(self) -> None:
        """Lets the next one in at once. A lease that was lost before stays as it is."""
        with self._writing, contextlib.suppress(LeaseLost):
            self.check()
            self._write(released=True)

    def _write(self, *, released: bool) -> None:
        data = _encode(self.owner, self._clock(), self.ttl_s, released, self._token)
        self.store.write_bytes(_path(self.stage, self.key, self.n), data)


def _held(stage: str, key: str, state: LeaseState, now: float) -> LeaseHeld:
    age = now - state.heartbeat
    return LeaseHeld(
        f"training of {stage}/{key[:12]} is held by {state.owner} "
        f"(heartbeat {age:.0f} s ago, expires after {state.ttl_s:g} s); wait for that run or cancel it",
        state.owner,
        age,
    )


def acquire(
    store: Store, stage: str, key: str, owner: dict[str, Any], ttl_s: float, *, clock: Clock = time.time
) -> Lease:
    """Takes the lease of a stage's key. Raises LeaseHeld while another is alive, or when another won the race.

    `owner`: who asks, as JSON (flow run id, host, pid); shown to those who find the lease held.
    """
    n = _highest(store, stage, key)
    if n:
        state = _read(store, stage, key, n, clock())
        if state.alive:
            raise _held(stage, key, state, clock())
    token = uuid.uuid4().hex
    store.create(_path(stage, key, n + 1), _encode(owner, clock(), ttl_s, False, token))
    # Whatever `create` answered, the file decides: see Store.create.
    state = _read(store, stage, key, n + 1, clock())
    if state.token != token:
        raise _held(stage, key, state, clock())
    return Lease(store, stage, key, state, clock)


def attach(store: Store, stage: str, key: str, n: int, *, clock: Clock = time.time) -> Lease:
    """The lease with this number, for a process that its holder started. Raises LeaseLost if it is no longer in
    force.
    """
    try:
        state = _read(store, stage, key, n, clock())
    except FileNotFoundError as error:
        raise LeaseLost(f"lease {n} on {stage}/{key[:12]} does not exist in store {store.url!r}") from error
    lease = Lease(store, stage, key, state, clock)
    lease.check()
    return lease


def holder(store: Store, stage: str, key: str, *, clock: Clock = time.time) -> LeaseState | None:
    """The highest lease, alive or not; None when there never was one."""
    n = _highest(store, stage, key)
    return _read(store, stage, key, n, clock()) if n else None


@contextlib.contextmanager
def keep_alive(lease: Lease) -> Iterator[Lease]:
    """Renews the lease every quarter of its time to live, on a daemon thread, while the block runs.

    Losing it ends the thread and makes the next `check` raise. A store that cannot be reached is tried again at the
    next turn: whether the lease was lost meanwhile, `check` finds out.
    """
    stop = threading.Event()

    def renew_until_stopped() -> None:
        while not stop.wait(lease.ttl_s / 4):
            try:
                lease.renew()
            except LeaseLost as lost:
                _log.warning("%s", lost)
                return
            except (OSError, StoreError) as error:
                _log.warning("lease %d on %s could not be renewed, trying again: %s", lease.n, lease.stage, error)

    thread = threading.Thread(target=renew_until_stopped, name=f"lease-{lease.stage}-{lease.n}", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join()
