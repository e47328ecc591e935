"""Worker groups on a local Ray: results by rank, and what a user reads when a rank fails, dies or hangs."""

import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.cluster.limit import Limit
from rlhf_core.cluster.session import ClusterError, ray_session
from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.pipeline import ClusterSettings
from rlhf_core.tracking.events import read_events

pytestmark = pytest.mark.engines

LONG = 60.0  # no test waits for it: a ClusterError that names it came by the deadline


_BEFORE: set[int] = set()  # children that other tests had started


@pytest.fixture(scope="module")
def session() -> Iterator[ExitStack]:
    """A local Ray of 2 actors, which the last test ends by closing it."""
    _BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where Ray's workers find plain_rank
        stack.enter_context(ray_session(ClusterSettings(), actors=2))
        yield stack


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def group_of_two(session: ExitStack, events: Path) -> Iterator[WorkerGroup]:
    group = new_group(2, events)
    try:
        group.call("__init__", per_rank=[(0,), (1,)], timeout_s=LONG)
        yield group
    finally:
        group.close()


def new_group(size: int, events: Path, **given: Any) -> WorkerGroup:
    return WorkerGroup(
        "trainer",
        "plain_rank:PlainRank",
        size,
        events=events,
        environment={"GIVEN": "to actors"},
        **{"start_timeout_s": LONG, **given},
    )


def errors_in(events: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(events) if event["type"] == "error"]


def cause(wait: Callable[[], Any]) -> str:
    with pytest.raises(ClusterError) as caught:
        wait()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_results_come_by_rank(group_of_two: WorkerGroup) -> None:
    shared = group_of_two.call("seen", "all", per_rank=[("a", 1), ("b", 2)], kwargs={"word": "x"}, timeout_s=LONG)
    assert shared == [
        (0, ("all", "a", 1), "x", "1", "to actors"),
        (1, ("all", "b", 2), "x", "1", "to actors"),
    ]
    assert group_of_two.call_rank(1, "seen", 5, timeout_s=LONG) == (1, (5,), "", "1", "to actors")
    # By rank too when rank 1 is done first.
    assert group_of_two.wait(group_of_two.start("sleep", {0: 0.5, 1: 0.0}), "sleep", timeout_s=LONG) == ["awake"] * 2
    pids = group_of_two.call("pid", timeout_s=LONG)
    assert len({*pids, os.getpid()}) == 3


def test_error_of_a_rank_is_what_the_user_reads(group_of_two: WorkerGroup, events: Path) -> None:
    message = cause(lambda: group_of_two.call("fail", 1, timeout_s=LONG))
    assert message == "trainer rank 1: ValueError: row 7 of rank 1 is bad"
    (error,) = errors_in(events)
    assert (error["role"], error["rank"], error["kind"]) == ("trainer", 1, "ValueError")
    assert error["message"] == "row 7 of rank 1 is bad"
    assert 'raise ValueError(f"row 7' in error["traceback"]


def test_class_that_cannot_be_made_says_why(session: ExitStack, events: Path) -> None:
    group = new_group(1, events)
    try:
        message = cause(lambda: group.call("__init__", timeout_s=LONG))
    finally:
        group.close()
    assert message.startswith("trainer rank 0: TypeError:")
    assert "missing 1 required positional argument: 'rank'" in message


def test_killed_rank_is_reported_while_its_peer_sleeps(group_of_two: WorkerGroup, events: Path) -> None:
    pid = group_of_two.call_rank(1, "pid", timeout_s=LONG)
    references = group_of_two.start("sleep", {0: 300, 1: 300})
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    message = cause(lambda: group_of_two.wait(references, "sleep", timeout_s=LONG))
    assert message == "trainer: a rank's process ended during sleep, killed from outside or out of memory"
    assert errors_in(events) == []


def test_killed_rank_is_the_cause_and_not_its_peers_broken_connection(group_of_two: WorkerGroup, events: Path) -> None:
    port = group_of_two.call_rank(0, "open_store", timeout_s=LONG)
    group_of_two.call("join", port, timeout_s=LONG)
    pid = group_of_two.call_rank(1, "pid", timeout_s=LONG)
    references = group_of_two.start("all_reduce")
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    message = cause(lambda: group_of_two.wait(references, "all_reduce", timeout_s=LONG))
    assert message == "trainer: a rank's process ended during all_reduce, killed from outside or out of memory"
    assert [error["rank"] for error in errors_in(events)] == [0]  # rank 0 did see it, as a broken connection


def test_hung_rank_is_named_with_the_deadline(group_of_two: WorkerGroup) -> None:
    limit = Limit(2.0, "dpo.trainer.step_timeout_s")
    message = cause(lambda: group_of_two.call("sleep", {0: 0.0, 1: 300.0}, timeout_s=limit))
    assert message == (
        "trainer: rank 1 did not finish sleep within 2 s; if it does not hang, raise dpo.trainer.step_timeout_s"
    )


def test_group_larger_than_the_cluster_is_refused(session: ExitStack, events: Path) -> None:
    message = cause(lambda: new_group(99, events, start_timeout_s=1.0))
    assert "trainer: 99 x {'CPU': 1.0} could not be placed within 1 s" in message
    assert message.endswith("ask for fewer ranks or add nodes")
    small = new_group(2, events)  # the refused one holds nothing
    small.close()


def ray_processes() -> list[psutil.Process]:
    """Descendants of this process that the session started: Ray's servers, the raylet and its workers."""
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in _BEFORE]


def is_loopback(ip: str) -> bool:
    """127.0.0.0/8 and ::1, and ::ffff:127.0.0.1, an IPv4 address that an IPv6 socket listens on."""
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def test_every_listening_socket_is_on_loopback(group_of_two: WorkerGroup) -> None:
    processes = [psutil.Process(), *ray_processes()]  # the driver listens too
    assert any("raylet" in process.name() for process in processes)
    listening = [
        (process.name(), connection.laddr)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert [entry for entry in listening if not is_loopback(entry[1].ip)] == []


def test_end_of_the_session_leaves_no_process(session: ExitStack, events: Path) -> None:
    """Even with a group that was not closed. Last in this file: the session is over."""
    group = new_group(2, events)
    group.call("__init__", per_rank=[(0,), (1,)], timeout_s=LONG)
    workers = group.call("pid", timeout_s=LONG)
    processes = ray_processes()
    assert set(workers) <= {process.pid for process in processes}
    session.close()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
