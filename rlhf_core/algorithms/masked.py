"""Reductions over masked tensors. Legend: B sequences, T token positions; masks are bool or 0/1, True where counted."""

import torch
from torch import Tensor


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where `mask` is 0, whatever stood there: 0 * NaN would be NaN, in the gradient too."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the valid entries. A NaN at a valid entry still shows, one at a masked entry does not."""
    return select(values, mask).sum()
