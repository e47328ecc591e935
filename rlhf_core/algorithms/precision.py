"""Losses are computed in float32 whatever the model's dtype, and in float64 where that is given."""

import torch
from torch import Tensor


def at_least_float32(values: Tensor) -> Tensor:
    """bfloat16 and float16 as float32; float32 and float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
