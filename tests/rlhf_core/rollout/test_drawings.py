"""Responses drawn in parts: a restart asks for what is missing alone, and gets the same."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.rollout.drawings import Drawing, KeptDrawings, draw
from rlhf_core.rollout.sample import Sample, SampleRequest
from rlhf_core.store.leases import Lease, LeaseLost, acquire
from rlhf_core.store.store import Store

KEY = "f" * 64
REQUESTS = [SampleRequest(n, (1, n), 4, 1.0, 1.0, n, (2,)) for n in range(5)]


class Engine:
    """Answers sample n with n + 1 tokens; keeps what it was asked for, and fails at `fails_at`."""

    def __init__(self, fails_at: int | None = None):
        self.asked: list[list[int]] = []
        self.fails_at = fails_at

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        numbers = [one.sample_id for one in requests]
        if self.fails_at in numbers:
            raise RuntimeError("killed")
        self.asked.append(numbers)
        return [
            Sample(n, tuple(range(n + 1)), np.zeros(n + 1, np.float32), "length" if n % 2 else "stop", 0)
            for n in numbers
        ]


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    return acquire(Store(f"{tmp_path}/store"), "sample", KEY, {"pid": 1}, 60)


@pytest.fixture
def kept(lease: Lease) -> KeptDrawings:
    return KeptDrawings(lease.store, "sample", KEY, lease)


def drawn(engine: Engine, kept: KeptDrawings, phase: str = "sampling") -> tuple[list[Drawing], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    found = draw(engine, REQUESTS, kept, phase, 2, lambda done, total: progress.append((done, total)))
    return found, progress


def test_a_restart_goes_on_with_the_part_that_is_missing(kept: KeptDrawings) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        drawn(Engine(fails_at=4), kept)
    again = Engine()
    found, progress = drawn(again, kept)
    assert again.asked == [[4]]
    assert [one.ids.tolist() for one in found] == [list(range(n + 1)) for n in range(5)]
    assert [one.truncated for one in found] == [False, True, False, True, False]
    assert progress == [(2, 5), (4, 5), (5, 5)]
    assert {one.ids.dtype for one in found} == {np.dtype(np.int32)}
    nothing = Engine()
    drawn(nothing, kept)
    assert nothing.asked == []


def test_phases_do_not_mix(kept: KeptDrawings) -> None:
    drawn(Engine(), kept)
    other = Engine()
    drawn(other, kept, "completing")
    assert other.asked == [[0, 1], [2, 3], [4]]


def test_without_the_lease_nothing_is_kept(kept: KeptDrawings, lease: Lease) -> None:
    lease.release()
    with pytest.raises(LeaseLost):
        drawn(Engine(), kept)
    assert kept.read("sampling", 0) is None


def test_nothing_in_a_part_is_run_when_it_is_read(kept: KeptDrawings) -> None:
    content = io.BytesIO()
    np.savez(content, ids=np.array([object()], dtype=object), lengths=np.array([1]), truncated=np.array([False]))
    kept.store.write_bytes(f"training/sample/{KEY}/samples/sampling-000000.npz", content.getvalue())
    with pytest.raises(ValueError, match="allow_pickle"):
        kept.read("sampling", 0)
