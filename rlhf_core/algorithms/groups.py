"""Baselines from the other responses of a rollout group. Legend: B trajectories, G groups.

Groups are those of the rollout: equal prompts in different groups stay apart. All return what is left of each score,
(B,) in its dtype, computed in float64. A group whose scores are all equal, so one of a single member too, has exactly
0: there is nothing to compare.
"""

import torch
from torch import Tensor


def group_centred(scores: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group: the baseline of REINFORCE++-baseline (Hu et al. 2025) and Dr. GRPO (Liu et al. 2025).

    scores: (B,) floating point. groups: (B,) long, any numbers.
    """
    index, sizes = _indexed(groups)
    return _kept(_centred(scores, index, sizes), scores, index, sizes)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group's *other* members (RLOO: Kool et al. 2019; Ahmadian et al. 2024). Shapes as above."""
    index, sizes = _indexed(groups)
    n = sizes[index].double()
    return _kept(_centred(scores, index, sizes) * n / (n - 1).clamp(min=1), scores, index, sizes)


def group_normalised(scores: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) over the group, std with n - 1 (GRPO: Shao et al. 2024, section 4.1.2). Shapes as above.

    None is above (n - 1) / sqrt(n) in size.
    """
    index, sizes = _indexed(groups)
    centred = _centred(scores, index, sizes)
    variance = _sums(centred**2, index, sizes) / (sizes - 1).clamp(min=1)
    return _kept(centred / (variance.sqrt()[index] + eps), scores, index, sizes)


def group_spread(scores: Tensor, groups: Tensor) -> Tensor:
    """(G,) in the order of the groups' numbers: largest less smallest score of each group."""
    index, sizes = _indexed(groups)
    return _spread(scores, index, sizes)


def group_std(scores: Tensor, groups: Tensor) -> Tensor:
    """(G,) in the order of the groups' numbers, float64: standard deviation with n - 1; 0 for a group of one."""
    index, sizes = _indexed(groups)
    return (_sums(_centred(scores, index, sizes) ** 2, index, sizes) / (sizes - 1).clamp(min=1)).sqrt()


def group_sizes(groups: Tensor) -> Tensor:
    """(G,) long, in the order of the groups' numbers."""
    return _indexed(groups)[1]


def _indexed(groups: Tensor) -> tuple[Tensor, Tensor]:
    """((B,) number of each trajectory's group from 0, (G,) sizes)."""
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, sizes


def _sums(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add(0, index, values.double())


def _centred(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return scores.double() - (_sums(scores, index, sizes) / sizes)[index]


def _spread(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    ends = [
        scores.new_zeros(len(sizes)).scatter_reduce(0, index, scores, which, include_self=False)
        for which in ("amax", "amin")
    ]
    return ends[0] - ends[1]


def _kept(values: Tensor, scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """Rounding gives equal scores a mean that is not theirs; divided by a standard deviation that shows."""
    equal = _spread(scores, index, sizes)[index] == 0
    return torch.where(equal, 0.0, values).to(scores.dtype)
