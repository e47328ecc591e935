"""The critic's loss, for each token. Schulman et al. 2017, "Proximal Policy Optimization Algorithms"."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2); without `clip` 0.5 * (V - R)^2.

    All of one shape. Returns the loss and, as bool, where the clipped branch was taken.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    bounded = (old_values + torch.clamp(values - old_values, -clip, clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), bounded > plain
