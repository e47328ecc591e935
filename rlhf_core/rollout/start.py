"""Starts a sampler as a Ray actor, without waiting for it. Loads without torch."""

from pathlib import Path
from typing import Any

from rlhf_core.cluster.limit import start_limit
from rlhf_core.cluster.workers import WorkerGroup, rank_environment
from rlhf_core.config.pipeline import ClusterSettings
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.rollout.environment import sampler_environment

SAMPLER = "rlhf_core.rollout.sampler:Sampler"


def start_sampler(
    model_dir: Path, settings: SamplerSettings, *, events: Path, cluster: ClusterSettings, seed: int = 0
) -> tuple[WorkerGroup, list[Any]]:
    """The sampler's group of one actor, and what `wait_for_sampler` waits for."""
    device = rank_environment()
    group = WorkerGroup(
        "sampler",
        SAMPLER,
        1,
        events=events,
        environment=sampler_environment(),
        start_timeout_s=cluster.start_timeout_s,
        gpus_per_rank=device["gpus_per_rank"] * settings.tensor_parallel_size,
    )
    return group, group.start("__init__", str(model_dir), settings, kwargs={"seed": seed})


def wait_for_sampler(group: WorkerGroup, starting: list[Any], cluster: ClusterSettings) -> None:
    group.wait(starting, "__init__", timeout_s=start_limit(cluster))
