"""Policy losses of each token, and what a token counts. Legend: R rows, L columns, M samples in them; see segments.py.

ratio = pi / pi_old of the token, which gradients flow through; A its advantage.
"""

from typing import Literal

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import select
from rlhf_core.algorithms.segments import segment_sums

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
_LARGEST_LOG = 20.0  # of a ratio: exp(20) is far outside any clipping, exp(89) is no float32


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old of each token; without a gradient beyond exp(-20) and exp(20). Any shape."""
    return torch.exp((logprobs - old_logprobs).clamp(-_LARGEST_LOG, _LARGEST_LOG))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, segments: Tensor, samples: int) -> Tensor:
    """(R, L): exp of the mean over the sample's tokens of log pi - log pi_old, at each of them; 1 where mask is 0.

    GSPO's ratio (Zheng et al. 2025). All (R, L); mask is True at action tokens.
    """
    log_ratio = select(logprobs, mask) - select(old_logprobs, mask)
    counts = segment_sums(mask.to(log_ratio.dtype), segments, samples)
    mean = segment_sums(log_ratio, segments, samples) / counts.clamp(min=1)
    spread = select(mean[segments.clamp(min=0)].to(log_ratio.dtype), mask)
    return torch.exp(spread.clamp(-_LARGEST_LOG, _LARGEST_LOG))


def clip_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A): Schulman et al. 2017, eq. 7, with a bound on each
    side (DAPO: Yu et al. 2025, eq. 10).

    dual_clip: where A < 0, at most -dual_clip * A, so that a large ratio does not run away (Ye et al. 2020).
    All of one shape. Returns the loss and, as bool, where a bound replaced the ratio.
    """
    plain = ratio * advantages
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    objective, bounded = torch.minimum(plain, clipped), clipped < plain
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        objective, bounded = torch.maximum(objective, floor), bounded | (objective < floor)
    return -objective, bounded


def cispo_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-clip(ratio, 1 - clip_low, 1 + clip_high) * A * log pi, the clipped ratio a constant (CISPO: MiniMax-M1, 2025).

    No token loses its gradient. All of one shape. Returns the loss and, as bool, where the ratio was clipped.
    """
    fixed = ratio.detach()
    weight = fixed.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, weight != fixed


def token_weights(mask: Tensor, segments: Tensor, samples: int, how: Aggregation) -> Tensor:
    """(R, L): what a token counts; 0 where mask is 0. The sum is divided by `denominator`, summed over the whole step.

    mask, segments: (R, L). token_mean: 1. sequence_mean: 1 / action tokens of its sample. constant: 1.
    """
    weights = mask.float()
    if how != "sequence_mean":
        return weights
    counts = segment_sums(weights, segments, samples).clamp(min=1).float()
    return weights / counts[segments.clamp(min=0)]


def denominator(mask: Tensor, segments: Tensor, samples: int, how: Aggregation, constant: int) -> float:
    """This micro-batch's share of what the sum over tokens is divided by.

    token_mean: action tokens, as in DAPO. sequence_mean: samples that have one, as in GRPO. constant: those samples
    times `constant`, the longest response, as in Dr. GRPO (Liu et al. 2025), whose gradient does not
    favour long wrong responses.
    """
    if how == "token_mean":
        return float(mask.sum())
    trained = float((segment_sums(mask.float(), segments, samples) > 0).sum())
    return trained * constant if how == "constant" else trained
