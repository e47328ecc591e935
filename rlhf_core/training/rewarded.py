"""A sampled response with its reward, which the mix makes of its sources: what a rollout consists of."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.rollout.prompts import Prompt
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.training.experience import Graded


@dataclass(frozen=True)
class Rewarded:
    """A sampled response and all that is known of it before training.

    values: of each source, as it is weighted. score: the weighted sum of what sources call their scores, by which
    groups are filtered. prompt, text: of a response that was not read from a dump.
    """

    trajectory: Trajectory
    graded: Graded
    values: Mapping[str, float]
    score: float
    prompt: Prompt | None = None
    text: str = ""


def rewarded(trajectory: Trajectory, mix: RewardMix, prompt: Prompt | None = None, text: str = "") -> Rewarded:
    """The reward of the whole mix, from the raw rewards of the trajectory's sources."""
    graded = Graded(
        reward=mix.total(trajectory.rewards),
        group=trajectory.group_id,
        truncated=trajectory.finish_reason == "length",
        step_scores=trajectory.step_scores,
        step_ends=trajectory.step_ends,
    )
    return Rewarded(trajectory, graded, mix.values(trajectory.rewards), mix.total(trajectory.scores), prompt, text)
