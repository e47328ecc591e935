"""Expected values by hand."""

import pytest

from rlhf_core.config.rl import RewardSettings
from rlhf_core.rollout.rewards import RewardMix, solution_verdict


def test_the_total_is_the_weighted_sum_of_the_measured_sources():
    mix = RewardMix(RewardSettings(rm=0.5, prm=2.0, exact=1.0), rm_mean=3.0, rm_std=2.0)
    # By hand: the score 7 counts (7 - 3) / 2 = 2, so half of that, twice a quarter, and one.
    assert mix.total({"rm": 7.0, "prm": 0.25, "exact": 1.0}) == pytest.approx(2.5)
    assert mix.values({"rm": 7.0, "exact": 1.0}) == {"rm": 2.0, "exact": 1.0}
    assert mix.totals([{"rm": 7.0}, {"exact": 1.0}]) == [1.0, 1.0]


def test_a_source_of_weight_0_is_measured_and_adds_nothing():
    mix = RewardMix(RewardSettings(exact=1.0))
    assert mix.total({"rm": 100.0, "exact": 0.0}) == 0.0
    assert mix.values({"rm": 100.0})["rm"] == 100.0


@pytest.mark.parametrize(
    ("aggregate", "verdict"), [("min", 0.2), ("mean", 0.5), ("last", 0.4), ("product", 0.9 * 0.2 * 0.4)]
)
def test_steps_become_one_verdict(aggregate, verdict):
    assert solution_verdict([0.9, 0.2, 0.4], aggregate) == pytest.approx(verdict)
    assert solution_verdict([], aggregate) == 0.0


def test_every_aggregate_that_the_settings_admit_is_computed():
    admitted = RewardSettings.model_json_schema()["properties"]["prm_aggregate"]["enum"]
    assert all(solution_verdict([0.5], aggregate) == 0.5 for aggregate in admitted)
