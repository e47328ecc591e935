import pytest

from rlhf_core.rollout.evaluation import sampled_metrics


def test_metrics_of_three_samples_by_hand():
    samples = [
        [(1.0, "7"), (0.0, "8"), (0.0, "8")],  # 1 of 3 right, the majority wrong
        [(1.0, "4"), (1.0, "4"), (0.25, "5")],  # 2 of 3 right, a part of a point for the third
    ]
    found = sampled_metrics(samples, [1, 2, 3])
    assert found == {
        "mean@3": pytest.approx((1 + 2.25) / 6),
        "majority@3": 0.5,
        "pass@1": pytest.approx((1 / 3 + 2 / 3) / 2),
        "pass@2": pytest.approx((2 / 3 + 1) / 2),
        "pass@3": 1.0,
    }
