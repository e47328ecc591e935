"""What the sampler says of its tokens' log-probs, against what the trainer says."""

import numpy as np
import pytest

from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.training.rl_metrics import parity


def trajectory(logprobs: list[float], mask: list[bool]) -> Trajectory:
    count = len(mask)
    return Trajectory(
        prompt_ids=np.array([1]),
        response_ids=np.arange(count),
        action_mask=np.array(mask),
        sampler_logprobs=np.array(logprobs, dtype=np.float32),
        version_spans=(VersionSpan(0, 0, count),),
        group_id=0,
        prompt_id=0,
        sample_id=0,
        finish_reason="stop",
    )


def test_nan_of_the_sampler_is_left_out_and_counted() -> None:
    sampled = [trajectory([-1.0, np.nan, 0.0], [True, True, False]), trajectory([-2.0, -3.0], [True, True])]
    ours = [np.array([-1.5, -1.0, -9.0]), np.array([-2.0, -2.0])]
    # Differences 0.5, (NaN), 0 and 1; the token of the environment does not count.
    assert parity(sampled, ours) == {"parity/max": 1.0, "parity/mean": 0.5, "parity/nan": 1.0}


def test_sampler_without_any_log_prob_is_an_error() -> None:
    with pytest.raises(ValueError, match="log-probs of all 2 tokens of the rollout are NaN"):
        parity([trajectory([np.nan, np.nan, 0.0], [True, True, False])], [np.zeros(3)])
