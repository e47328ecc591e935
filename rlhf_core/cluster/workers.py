"""Groups of ranks as Ray actors, called together, with a deadline and with the first cause of a failure."""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.cluster.limit import Limit
from rlhf_core.cluster.session import ClusterError
from rlhf_core.tracking.events import EventLog, first_error

# One thread a rank: the number enters the bits, and ranks that share cores would starve one another with more.
_RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def rank_environment() -> dict[str, Any]:
    """What a rank's actor gets on this cluster: one GPU where there are any, else the CPU, and said so to DeepSpeed.

    Returned as keyword arguments of WorkerGroup: gpus_per_rank and environment.
    """
    if ray.cluster_resources().get("GPU", 0) > 0:
        return {"gpus_per_rank": 1.0, "environment": {}}
    return {"gpus_per_rank": 0.0, "environment": {"DS_ACCELERATOR": "cpu"}}


class RankHost:
    """The actor: holds one object of a class given by name, made after the environment is set."""

    def __init__(self, environment: Mapping[str, str], target: str, role: str, rank: int, events: str):
        os.environ.update(environment)
        self._role, self._rank, self._events = role, rank, EventLog(events)
        self._target = target
        self._object: Any = None

    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method; `__init__` makes the object. An error is written down here, before anything else ends."""
        try:
            if method == "__init__":
                module, name = self._target.rsplit(":", 1)
                self._object = getattr(importlib.import_module(module), name)(*args, **kwargs)
                return None
            return getattr(self._object, method)(*args, **kwargs)
        except BaseException as error:
            self._events.error(error, self._role, self._rank)
            raise


class WorkerGroup:
    """`size` actors of one role. All calls go to all ranks, since collectives want every rank."""

    def __init__(
        self,
        role: str,
        target: str,
        size: int,
        *,
        events: Path,
        environment: Mapping[str, str],
        start_timeout_s: float,
        gpus_per_rank: float = 0,
    ):
        """`target` is "module:Class", imported inside the actors. Raises ClusterError if they cannot be placed.

        Rank 0, which writes files that the driver reads, is placed on the driver's node where there is room for it.
        """
        self.role, self.size, self._events_path = role, size, events
        resources = {"CPU": 1.0, **({"GPU": gpus_per_rank} if gpus_per_rank else {})}
        placement = _placed(resources, size, start_timeout_s)
        if placement is None:
            raise ClusterError(
                f"{role}: {size} x {resources} could not be placed within {start_timeout_s:.0f} s; the cluster has "
                f"{ray.available_resources()} free: ask for fewer ranks or add nodes"
            )
        self._placement = placement
        remote = ray.remote(RankHost)
        self._actors: list[Any] = [
            remote.options(
                num_cpus=1,
                num_gpus=gpus_per_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, bundle),
            ).remote({**_RANK_ENVIRONMENT, **environment}, target, role, bundle, str(events))
            for bundle in range(size)
        ]

    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        per_rank: Sequence[Sequence[Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """The method's results by rank. `per_rank[r]` are arguments of rank r alone, after `args`. timeout_s: best a
        Limit, whose setting the message of a call that takes longer names.

        Raises ClusterError with the first error that any rank wrote, or the names of ranks that did not answer.
        """
        return self.wait(self.start(method, *args, per_rank=per_rank, kwargs=kwargs), method, timeout_s=timeout_s)

    def start(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[Sequence[Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Like `call`, and returns at once with Ray references."""
        own = per_rank or [()] * self.size
        return [
            actor.call.remote(method, *args, *own[rank], **(kwargs or {})) for rank, actor in enumerate(self._actors)
        ]

    def call_rank(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        """For methods without a collective."""
        return self.wait([self._actors[rank].call.remote(method, *args)], method, timeout_s=timeout_s, ranks=[rank])[0]

    def wait(self, references: list[Any], method: str, *, timeout_s: float, ranks: Sequence[int] = ()) -> list[Any]:
        """Results of references made by `start`, in their order."""
        ranks = ranks or range(self.size)
        deadline = time.monotonic() + timeout_s
        pending = list(references)
        while pending:
            # One at a time as they finish: a failure is seen at once, while its peers may hang in a collective.
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [rank for rank, ref in zip(ranks, references, strict=True) if ref in pending]
                setting = timeout_s.setting if isinstance(timeout_s, Limit) else "the stage's timeout"
                raise ClusterError(
                    f"{self.role}: rank {', '.join(map(str, late))} did not finish {method} within {timeout_s:.0f} s; "
                    f"if it does not hang, raise {setting}"
                )
            error = _error_of(done[0])
            if error is not None:
                raise ClusterError(self._cause(error, pending, method)) from error
        return ray.get(references)

    def _cause(self, error: Exception, pending: list[Any], method: str) -> str:
        """One line for the first cause. A peer of a killed rank fails too, with a broken connection: not the cause."""
        others, _ = ray.wait(pending, num_returns=len(pending), timeout=_PEERS_S) if pending else ([], [])
        errors = [error, *(found for found in map(_error_of, others) if found is not None)]
        written = first_error(self._events_path)
        if any(isinstance(found, _PROCESS_ENDED) for found in errors):
            killed = f"{self.role}: a rank's process ended during {method}, killed from outside or out of memory"
            own = written and not _is_broken_connection(written["message"])
            return _line(written) if written and own else killed
        return _line(written) if written else f"{self.role}: {method}: {' '.join(str(error).split())[:500]}"

    def node_address(self, rank: int) -> str:
        """Address of the node that a rank is on, as its peers reach it."""
        return ray.get(self._actors[rank].node_address.remote(), timeout=60)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._placement)


def _placed(resources: dict[str, float], size: int, timeout_s: float) -> PlacementGroup | None:
    """`size` bundles, the first on this node or, where it has no room, as Ray likes; None: not within timeout_s."""
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    for selector, limit in (([here, *[{}] * (size - 1)], min(_HERE_S, timeout_s)), ([{}] * size, timeout_s)):
        placement = placement_group([resources] * size, strategy="PACK", bundle_label_selector=selector)
        if placement.wait(limit):
            return placement
        remove_placement_group(placement)
    return None


# Ray's memory monitor, a lost node and a crash have errors of their own beside that of a dead actor.
_PROCESS_ENDED = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
_HERE_S = 10.0  # free resources are given at once, and those of a group that just ended within seconds
_PEERS_S = 3.0  # how long the peers of a failed rank are given to fail too


def _error_of(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except RayError as error:
        return error
    return None


def _is_broken_connection(message: str) -> bool:
    return "gloo" in message or "Connection" in message or "NCCL" in message


def _line(event: Mapping[str, Any]) -> str:
    rank = "" if event["rank"] is None else f" rank {event['rank']}"
    return f"{event['role']}{rank}: {event['kind']}: {event['message']}"
