import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest

from rlhf_core.store.leases import Lease, LeaseHeld, LeaseLost, acquire, attach, holder, keep_alive
from rlhf_core.store.store import Store, StoreError

KEY = "ab" * 32
DIRECTORY = f"training/sft/{KEY}/lease"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def take(store: Store, clock: Clock, who: str) -> Lease:
    return acquire(store, "sft", KEY, {"flow_run": who}, 60.0, clock=clock)


def test_a_live_lease_is_held_and_says_by_whom(store: Store, clock: Clock) -> None:
    assert holder(store, "sft", KEY, clock=clock) is None
    lease = take(store, clock, "one")
    assert lease.n == 1
    assert store.list_names(DIRECTORY) == ["000001.json"]
    clock.now += 45
    with pytest.raises(LeaseHeld, match=r"'one'.*heartbeat 45 s ago") as held:
        take(store, clock, "two")
    assert (held.value.owner, held.value.age) == ({"flow_run": "one"}, 45.0)
    assert copy.copy(held.value).owner == {"flow_run": "one"}
    state = holder(store, "sft", KEY, clock=clock)
    assert state is not None
    assert (state.n, state.owner, state.heartbeat, state.alive) == (1, {"flow_run": "one"}, 1000.0, True)
    lease.check()


def test_renewal_prolongs(store: Store, clock: Clock) -> None:
    lease = take(store, clock, "one")
    clock.now += 59
    lease.renew()
    clock.now += 59
    with pytest.raises(LeaseHeld):
        take(store, clock, "two")


def test_an_expired_lease_is_taken_over_and_its_holder_finds_out(store: Store, clock: Clock) -> None:
    first = take(store, clock, "one")
    clock.now += 60
    state = holder(store, "sft", KEY, clock=clock)
    assert state is not None
    assert not state.alive
    first.check()
    second = take(store, clock, "two")
    assert second.n == 2
    for use in (first.check, first.renew):
        with pytest.raises(LeaseLost, match=r"taken over by .*'two'"):
            use()
    first.release()
    second.check()
    assert store.list_names(DIRECTORY) == ["000001.json", "000002.json"]


def test_a_released_lease_is_free_at_once(store: Store, clock: Clock) -> None:
    first = take(store, clock, "one")
    first.release()
    with pytest.raises(LeaseLost, match="released"):
        first.check()
    assert take(store, clock, "two").n == 2


def test_one_of_many_acquires(store: Store, clock: Clock) -> None:
    take(store, clock, "dead")
    clock.now += 61
    barrier = Barrier(6)

    def attempt(index: int) -> Lease | LeaseHeld:
        barrier.wait()
        try:
            return take(store, clock, str(index))
        except LeaseHeld as held:
            return held

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(attempt, range(6)))
    winners = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    assert [lease.n for lease in winners] == [2]
    losers = [outcome.owner for outcome in outcomes if isinstance(outcome, LeaseHeld)]
    assert losers == [winners[0].owner] * 5


def test_a_child_attaches_by_number(store: Store, clock: Clock) -> None:
    parent = take(store, clock, "one")
    child = attach(store, "sft", KEY, parent.n, clock=clock)
    clock.now += 59
    child.renew()
    clock.now += 59
    parent.check()
    with pytest.raises(LeaseHeld):
        take(store, clock, "two")
    parent.release()
    with pytest.raises(LeaseLost, match="released"):
        child.renew()
    with pytest.raises(LeaseLost, match="does not exist"):
        attach(store, "sft", KEY, 7, clock=clock)


def test_a_number_written_by_two_belongs_to_the_last(store: Store, clock: Clock) -> None:
    """As on a store that ignores the condition of a conditional put."""
    first = take(store, clock, "one")
    path = f"{DIRECTORY}/000001.json"
    store.delete_file(path)
    second = take(store, clock, "two")
    with pytest.raises(LeaseLost, match=r"overwritten by .*'two'"):
        first.check()
    second.check()
    store.delete_file(path)
    with pytest.raises(LeaseLost, match="deleted"):
        second.check()


def test_what_is_no_lease_is_named(store: Store, clock: Clock) -> None:
    store.write_bytes(f"{DIRECTORY}/notes.txt", b"not a lease file")
    store.write_bytes(f"{DIRECTORY}/000003.json", b'{"owner": ')
    with pytest.raises(StoreError, match=r"000003\.json .*is not a lease"):
        take(store, clock, "one")


def test_numbers_are_ordered_as_numbers(store: Store, clock: Clock) -> None:
    for n in range(1, 12):
        lease = take(store, clock, str(n))
        assert lease.n == n
        lease.release()


class SignallingStore(Store):
    """Sets `written` after each write, so that a test waits for a renewal instead of for time to pass."""

    def __init__(self, url: str):
        super().__init__(url)
        self.written = Event()
        self.failures = 0

    def write_bytes(self, path: str, data: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the store is away")
        super().write_bytes(path, data)
        self.written.set()


def test_keep_alive_renews_and_survives_a_store_that_is_away(store: Store, clock: Clock) -> None:
    signalling = SignallingStore(store.url)
    lease = acquire(signalling, "sft", KEY, {}, 0.04, clock=clock)
    clock.now += 1
    signalling.failures = 2
    with keep_alive(lease):
        assert signalling.written.wait(30)
    assert signalling.failures == 0
    state = holder(store, "sft", KEY, clock=clock)
    assert state is not None
    assert state.heartbeat == 1001.0


def test_keep_alive_records_a_lost_lease(store: Store, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    lease = acquire(store, "sft", KEY, {}, 0.04, clock=clock)
    clock.now += 1
    take(store, clock, "two")
    lost = Event()
    caplog.handler.addFilter(lambda record: lost.set() or True)
    with keep_alive(lease):
        assert lost.wait(30)
    # Though the other one is gone again, what was lost stays lost.
    store.delete_file(f"{DIRECTORY}/000002.json")
    with pytest.raises(LeaseLost, match=r"taken over by .*'two'"):
        lease.check()
