"""Reductions over the samples that lie in the rows of a micro-batch.

Legend: R rows, L columns, M samples. `segments` (R, L) long says which sample, 0..M-1, a token belongs to; -1 is fill.
A sample's tokens lie side by side in one row, in their order. Nothing on fill, a NaN neither, enters any result.
"""

import torch
from torch import Tensor


def segment_sums(values: Tensor, segments: Tensor, samples: int) -> Tensor:
    """(M,) float64: the sum of each sample's values, 0 for a sample without a token. values: (R, L).

    In float64 a sum over thousands of float32 log-probs does not depend on their order, nor on the row they lie in.
    """
    index = segments.flatten()
    kept = torch.where(index >= 0, values.flatten().double(), 0.0)
    return kept.new_zeros(samples).index_add(0, index.clamp(min=0), kept)


def last_in_segment(values: Tensor, segments: Tensor, samples: int) -> Tensor:
    """(M,): the value at each sample's last token, NaN for a sample without a token. values: (R, L)."""
    index = segments.flatten()
    positions = torch.where(index >= 0, torch.arange(index.numel(), device=index.device), -1)
    last = index.new_full((samples,), -1).scatter_reduce(0, index.clamp(min=0), positions, "amax")
    return torch.where(last >= 0, values.flatten()[last.clamp(min=0)], torch.nan)


def number_in_segment(targets: Tensor, segments: Tensor, samples: int) -> Tensor:
    """(R, L) long: 1 at a sample's first target, 2 at its second and so on; 0 elsewhere. targets: (R, L) bool."""
    here = (targets & (segments >= 0)).long()
    through = here.cumsum(dim=1)
    index = segments.clamp(min=0)
    # How many targets of its row stand before a sample; a row's count only grows, so it is the least at its tokens.
    before = torch.where(segments >= 0, through - here, segments.shape[1]).flatten()
    start = index.new_full((samples,), segments.shape[1]).scatter_reduce(0, index.flatten(), before, "amin")
    return (through - start[index]) * here
