"""What a rollout says of itself, against numbers by hand."""

from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rewards import RewardSettings
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.training.rewarded import rewarded
from rlhf_core.training.rl_metrics import Clock, rollout_metrics, staleness, throughput

MIX = RewardMix(RewardSettings(rm=2.0, exact=1.0), rm_mean=1.0, rm_std=0.5)


def trajectory(prompt: int, length: int, *spans: VersionSpan, reason: str = "stop", **more: Any) -> Trajectory:
    return Trajectory(
        prompt_ids=np.zeros(prompt, np.int64),
        response_ids=np.zeros(length, np.int64),
        action_mask=np.ones(length, bool),
        sampler_logprobs=np.zeros(length, np.float32),
        version_spans=spans or (VersionSpan(3, 0, length),),
        group_id=4,
        prompt_id=0,
        sample_id=0,
        finish_reason=reason,  # type: ignore[arg-type]
        **more,
    )


def test_a_reward_is_the_mix_of_the_raw_rewards():
    one = rewarded(trajectory(2, 3, rewards={"rm": 2.0, "exact": 1.0}, scores={"rm": 1.0, "exact": 0.5}), MIX)
    # rm: (2 - 1) / 0.5 = 2, twice, and 1; the score likewise: 0 and 0.5.
    assert (one.graded.reward, one.score, one.values) == (5.0, 0.5, {"rm": 2.0, "exact": 1.0})
    assert (one.graded.group, one.graded.truncated) == (4, False)


def test_metrics_of_a_rollout():
    rollout = [
        rewarded(trajectory(2, 4, reason="length", rewards={"rm": 1.0, "exact": 1.0}, scores={"exact": 1.0}), MIX),
        rewarded(trajectory(2, 2, rewards={"rm": 1.0}), MIX),
        rewarded(trajectory(5, 3, rewards={"rm": 2.0, "exact": 0.0}), MIX),
    ]
    found = rollout_metrics(rollout, version=3)
    rewards = [1.0, 0.0, 4.0]
    percentiles = {f"reward_percentile/{at}": np.percentile(rewards, at) for at in range(0, 101, 10)}
    assert found == pytest.approx(
        {
            **{"responses": 3, "reward": 5 / 3, "reward_std": np.std(rewards), **percentiles},
            **{"reward/rm": 2 / 3, "reward/exact": 0.5, "score": 1 / 3},  # exact of those that have one
            **{"response_tokens": 3, "response_tokens_std": np.sqrt(2 / 3), "total_tokens": 18 / 3},
            **{"truncated": 1 / 3, "staleness": 0, "staleness/max": 0},
        }
    )


def test_staleness_counts_updates_by_token():
    old = trajectory(1, 4, VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))
    # Three tokens are two updates behind, one is one behind, and two are none.
    assert staleness([old, trajectory(1, 2)], 3) == {"staleness": pytest.approx(7 / 6), "staleness/max": 2.0}


def test_tokens_a_second_are_of_all_accelerators_and_of_each():
    assert throughput("train", 120, 2.0, 4) == {"tokens_per_s/train": 60.0, "tokens_per_s/train/accelerator": 15.0}


def test_a_clock_adds_up_the_rounds_of_a_phase_and_knows_the_step():
    clock = Clock()
    for name in ("rollout", "reward", "rollout"):
        clock.lap(name)
    found = clock.metrics()
    assert list(found) == ["seconds/rollout", "seconds/reward", "seconds/step"]
    assert found["seconds/step"] >= found["seconds/rollout"] + found["seconds/reward"]
