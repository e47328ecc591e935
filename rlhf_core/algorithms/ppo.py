"""Losses of PPO, for each token. Schulman et al. 2017, "Proximal Policy Optimization Algorithms"."""

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), eq. 7, with a bound on each side.

    All of one shape. Returns the loss and, as bool, where the clipped branch was taken.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2).

    All of one shape. Returns the loss and, as bool, where the clipped branch was taken.
    """
    plain = (values - returns) ** 2
    bounded = (old_values + torch.clamp(values - old_values, -clip, clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), bounded > plain
