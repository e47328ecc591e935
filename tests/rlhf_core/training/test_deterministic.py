"""trainer.deterministic: what a rank switches on when it joins, and that training goes through it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config.supervised import SftSettings
from rlhf_core.training.rank import LOOPBACK, Job, TrainerRank

pytestmark = pytest.mark.engines


class BareRank(TrainerRank):
    def _save(self, directory: Path) -> None: ...

    def _restore(self, directory: Path) -> None: ...


def joined(rank: int, ranks: int, *, job: Job) -> dict[str, Any]:
    """A rank's switches and variables once it has joined. It stays in this process's group."""
    made = BareRank(rank, ranks, job)
    made.join(LOOPBACK, made.open_rendezvous(LOOPBACK))
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "variables": [os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")],
    }


def job_of(tmp_path: Path, **trainer: Any) -> Job:
    settings = {"model": {"path": "/model"}, "optimizer": {"lr": 1.0}, "batch_size": 8, "max_len": 32, "max_steps": 1}
    own = SftSettings.model_validate({**settings, "trainer": trainer})
    return Job("sft", "a" * 64, own, str(tmp_path), 1, str(tmp_path))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_rank_switches_it_on_when_it_joins(
    groups: Any, llama: str, exchanges: Sequence[Any], tmp_path: Path, deterministic: bool
) -> None:
    group = type(groups[1])(1)  # its own: the switches stay on
    try:
        found = group.run("test_deterministic:joined", job=job_of(tmp_path, deterministic=deterministic))[0]
        variables = [":4096:8", "1"] if deterministic else [None, None]
        assert found == {
            "algorithms": deterministic,
            "warns only": False,
            "cudnn": (deterministic, False),
            "variables": variables,
        }
        for zero_stage in (2, 3) if deterministic else ():
            step = {"kind": "sft", "model": llama, "samples": exchanges}
            step["trainer"] = {"micro_batch_size": 2, "zero_stage": zero_stage}
            gradients, plain = (one.run("gradient", **step)[0]["gradients"] for one in (group, groups[1]))
            for name, gradient in gradients.items():
                np.testing.assert_array_equal(gradient, plain[name])
    finally:
        group.close()
