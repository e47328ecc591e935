"""Which groups a rollout is made of, and which step is the best. What is sampled is given; nothing is started."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.outcomes import Failed, Outcome, Scored
from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.training.experience import Graded, Judgement
from rlhf_core.training.rewarded import Rewarded
from rlhf_core.training.rl_loop import PpoRun
from rlhf_core.training.rl_metrics import Clock
from rlhf_core.training.rl_rollout import Rollouts, Round


def settings_of(**dynamic: Any) -> PpoSettings:
    return PpoSettings.model_validate(
        {
            "optimizer": {"lr": 1.0},
            "algorithm": {"preset": "grpo", "dynamic_sampling": dynamic},
            "rollout": {"prompts": 3, "samples_per_prompt": 2, "max_new_tokens": 4, "max_prompt_len": 4},
            "reward": {"exact": 1.0},
            "steps": 4,
            "batch_size": 6,
            "best_metric": "exact_match",
        }
    )


def group_of(number: int, scores: tuple[float, float]) -> list[Rewarded]:
    trajectory: Any = Trajectory(np.array([1]), np.array([]), np.array([]), np.array([]), (), number, number, 0, "stop")
    return [Rewarded(trajectory, Graded(9.0, number), {}, score) for score in scores]


class Given(Rollouts):
    """Groups' scores in the order in which prompts are drawn; None for a group that could not be scored."""

    def __init__(self, settings: PpoSettings, scores: list[tuple[float, float] | None]):
        self.settings = settings
        self.scores = scores
        self.asked: list[tuple[int, int]] = []

    def _round(self, step: int, count: int, first_group: int, clock: Any) -> Round:
        self.asked.append((count, first_group))
        clock.lap("rollout")
        drawn = range(first_group, first_group + count)
        groups = [group_of(n, scores) for n in drawn if (scores := self.scores[n]) is not None]
        outcomes: list[dict[str, Outcome]] = [
            {"exact": Failed("timeout", "late") if self.scores[n] is None else Scored(1.0, extra={"tokens": float(n)})}
            for n in drawn
        ]
        return Round(groups, outcomes, list(drawn), [Judgement()] * count, tokens=7 * count)


def rollout(settings: PpoSettings, scores: list[tuple[float, float] | None]) -> tuple[list[int], Any, Given]:
    run = Given(settings, scores)
    made, metrics = run.draw(1, Clock())
    assert [one.graded.group for one in made[::2]] == [one.graded.group for one in made[1::2]]
    return [one.graded.group for one in made[::2]], metrics, run


def without_speed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("tokens_per_s/")}


FLAT, SPREAD = (1.0, 1.0), (0.0, 1.0)


def test_without_dynamic_sampling_every_group_is_taken() -> None:
    groups, metrics, run = rollout(settings_of(), [FLAT, SPREAD, FLAT])
    assert groups == [0, 1, 2]
    assert run.asked == [(3, 0)]
    assert without_speed(metrics) == {"reward/failed": 0.0, "reward/dropped_groups": 0.0, "reward/exact/tokens": 1.0}


def test_groups_without_spread_are_replaced_by_those_of_further_prompts() -> None:
    groups, metrics, run = rollout(settings_of(enabled=True), [FLAT, SPREAD, FLAT, FLAT, SPREAD, SPREAD])
    assert groups == [1, 4, 5]
    assert run.asked == [(3, 0), (2, 3), (1, 5)]
    assert metrics["dynamic_sampling/rounds"] == 3
    assert metrics["dynamic_sampling/groups"] == 6
    assert metrics["dynamic_sampling/without_spread"] == 0.5
    assert metrics["dynamic_sampling/pass_rate"] == 0.5
    assert metrics["dynamic_sampling/filled"] == 0
    assert metrics["reward/exact/tokens"] == 2.5  # the mean of all six, not of the rounds' means


def test_rounds_are_bounded_and_groups_without_spread_fill_up() -> None:
    groups, metrics, run = rollout(settings_of(enabled=True, max_rounds=2), [FLAT, SPREAD, FLAT, FLAT, FLAT])
    assert groups == [1, 0, 2]
    assert run.asked == [(3, 0), (2, 3)]
    assert metrics["dynamic_sampling/filled"] == 2


def test_spread_has_to_be_above_the_least() -> None:
    groups, _, _ = rollout(settings_of(enabled=True, min_spread=0.5), [(0.0, 0.5), (0.0, 0.6), FLAT, SPREAD, SPREAD])
    assert groups == [1, 3, 4]


def test_what_could_not_be_scored_is_missing_or_replaced() -> None:
    groups, _, _ = rollout(settings_of(), [None, SPREAD, FLAT])
    assert groups == [1, 2]
    groups, metrics, _ = rollout(settings_of(enabled=True), [None, SPREAD, SPREAD, None, SPREAD])
    assert groups == [1, 2, 4]
    assert (metrics["reward/exact/failed/timeout"], metrics["reward/failed"], metrics["reward/dropped_groups"]) == (
        2.0,
        2.0,
        2.0,
    )
    with pytest.raises(ValueError, match="3 groups could be scored; the first failure, of source exact: timeout: "):
        rollout(settings_of(), [None, None, None])


@pytest.mark.parametrize(
    ("curve", "improved"),
    [
        ([(0, 0.9)], False),  # what training started from is no result
        ([(0, 0.9), (2, 0.1)], True),
        ([(0, 0.9), (2, 0.5), (4, 0.5)], False),
        ([(0, 0.9), (2, 0.5), (4, 0.6)], True),
    ],
)
def test_a_step_is_the_best_if_its_evaluation_is_better_than_each_before(curve: Any, improved: bool) -> None:
    run: Any = PpoRun.__new__(PpoRun)
    run.job = SimpleNamespace(settings=settings_of())
    run.history = SimpleNamespace(curve=lambda name, phase: tuple(map(list, zip(*curve, strict=True))))
    assert run._improved(curve[-1][0]) == improved
    assert not run._improved(5)
