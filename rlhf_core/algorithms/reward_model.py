"""Losses of the reward model, for each pair of scores. Computed in float32, or in float64 where scores are."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.algorithms.precision import at_least_float32


def pairwise_sigmoid_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin).

    Bradley-Terry (Ouyang et al. 2022, eq. 1); with the margin, Touvron et al. 2023 (Llama 2), eq. 2.
    chosen, rejected, margin: (pairs,). Returns (pairs,).
    """
    difference = at_least_float32(chosen) - at_least_float32(rejected)
    return -logsigmoid(difference if margin is None else difference - margin)


def pairwise_log_exp_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """log(1 + exp(r_rejected - r_chosen)), without overflow (Ouyang et al. 2022, eq. 1, another way of writing it).

    chosen, rejected: (pairs,). Returns (pairs,).
    """
    difference = at_least_float32(rejected) - at_least_float32(chosen)
    return torch.logaddexp(difference, torch.zeros_like(difference))


def centering_penalty(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(r_chosen + r_rejected)^2, which keeps scores around 0 (Eisenstein et al. 2023, eq. 2).

    chosen, rejected: (pairs,). Returns (pairs,).
    """
    return (at_least_float32(chosen) + at_least_float32(rejected)) ** 2
