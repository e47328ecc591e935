"""The summary of the stage sample."""

from typing import Any

import pytest

from stages.sample_shown import summary


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({}, "no sample has a reward"),
        (
            {"reward": 0.25, "reward/best": 0.75},
            "mean reward **0.250**, of the best of each prompt **0.750**",
        ),
    ],
)
def test_samples_may_have_no_reward_at_all(rewards: dict[str, float], said: str) -> None:
    """Of form steps the completions have rewards, and every whole solution's may have failed."""
    report: dict[str, Any] = {
        "form": "steps",
        "rows": 3,
        "eval_rows": 1,
        "metrics": {"samples": 8, "prompts": 4, **rewards},
        "characters": {"min": 2, "median": 3.5, "max": 9},
        "example": {"prompt": "1+1=", "steps": ["1+1=2"], "labels": [True]},
    }
    assert f"of 8 samples of 4 prompts; {said}; 2 / 3.5 / 9 characters (min / median / max)" in summary(report)
