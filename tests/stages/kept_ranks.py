"""Trainer ranks that are kept from stage to stage, in the place of the Ray actors that each stage starts for itself.

`KeptRanks` is for the process that drives them; the functions below are what the ranks run
(tests/rlhf_core/training/ranks.py calls them by name).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TRAINING_TESTS = Path(__file__).resolve().parents[1] / "rlhf_core" / "training"
sys.path[:0] = [str(Path(__file__).parent), str(TRAINING_TESTS)]  # the ranks inherit it and find this file

_held: dict[str, Any] = {}


def new_ranks(size: int) -> Any:
    """Joined ranks; to be closed."""
    from ranks import Ranks  # pyright: ignore[reportMissingImports]

    ranks = Ranks(size)
    ranks.join()
    return ranks


class KeptGroup:
    """What supervised_loop.py asks of a WorkerGroup."""

    def __init__(self, ranks: Any, target: str, job: Any):
        self._ranks = ranks
        ranks.run("kept_ranks:make", target=target, job=job)

    def call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return self._ranks.run("kept_ranks:call", method=method, arguments=arguments)

    def close(self) -> None:
        self._ranks.run("kept_ranks:end")


@contextmanager
def instead_of_ray(ranks: Any) -> Iterator[None]:
    """Stages that this process runs inside have `ranks` as their trainers."""

    @contextmanager
    def no_session(settings: Any, *, actors: int) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_core.cluster.session.ray_session", no_session)
        patch.setattr("rlhf_core.training.rank.start_trainers", lambda target, job, *_: KeptGroup(ranks, target, job))
        yield


def make(rank: int, ranks: int, *, target: str, job: Any) -> None:
    from ranks import named  # pyright: ignore[reportMissingImports]

    _held["trainer"] = named(target)(rank, ranks, job)


def call(rank: int, ranks: int, *, method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_held["trainer"], method)(*arguments)


def end(rank: int, ranks: int) -> None:
    _held.pop("trainer").engine.close()
