"""Rewards for each step of a solution, from the probabilities that its steps are right.

Legend: B trajectories, T tokens; p_k is what a process reward model gives for step k of K.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.algorithms.groups import group_centred, group_normalised

StepForm = Literal["sum", "progress"]
StepBaseline = Literal["none", "centred", "normalised"]


def step_values(probabilities: Sequence[float], form: StepForm) -> list[float]:
    """A reward for each step.

    sum: p_k itself, so that the return from step k on is p_k + ... + p_K (Uesato et al. 2022; Wang et al. 2024,
    Math-Shepherd, section 4.4). It grows with the number of steps.
    progress: p_k - p_{k-1} with p_0 = 0, what a step adds to the chance of success (Setlur et al. 2024, "Rewarding
    Progress", section 3). The sum over all steps is p_K, however many there are.
    """
    if form == "sum":
        return [float(p) for p in probabilities]
    return [float(p) - float(before) for before, p in pairwise([0.0, *probabilities])]


def baselined_steps(
    values: Sequence[Sequence[float]], groups: Sequence[int], baseline: StepBaseline
) -> list[list[float]]:
    """Step rewards less the mean over all steps of all responses of their rollout group, and "normalised" by their
    standard deviation as well (Shao et al. 2024, section 4.1.3, GRPO with process supervision).

    values: B lists. groups: B numbers. "none" gives them back.
    """
    flat = torch.tensor([value for row in values for value in row], dtype=torch.float64)
    if baseline == "none" or not len(flat):
        return [list(row) for row in values]
    owner = torch.tensor([group for row, group in zip(values, groups, strict=True) for _ in row])
    left = (group_centred if baseline == "centred" else group_normalised)(flat, owner).tolist()
    at = iter(left)
    return [[next(at) for _ in row] for row in values]


def placed_steps(values: Sequence[Sequence[float]], ends: Sequence[Sequence[int]], action_mask: Tensor) -> Tensor:
    """(B, T) float32: each step's reward at the last action token that is not behind the step's last token.

    ends: for each reward the position of its step's last token in the response. action_mask: (B, T). Rewards that meet
    on one token add up. Raises ValueError for a step before the first action token.
    """
    placed = torch.zeros(action_mask.shape, dtype=torch.float32)
    positions = torch.arange(action_mask.shape[1])
    last_action = torch.where(action_mask.bool().cpu(), positions, -1).cummax(dim=1).values
    for row, (rewards, at) in enumerate(zip(values, ends, strict=True)):
        for reward, end in zip(rewards, at, strict=True):
            place = int(last_action[row, end])
            if place < 0:
                raise ValueError(f"trajectory {row}: a step ends at token {end}, before the first action token")
            placed[row, place] += reward
    return placed
