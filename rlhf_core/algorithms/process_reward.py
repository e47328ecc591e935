"""Losses of the process reward model, for each step. Legend: T steps, K reward tokens, of which the first means right.

The verdict on a step is the softmax over the logits of the reward tokens alone; with two of them, the cross entropy
is that of Wang et al. 2024 (Math-Shepherd), eq. 2. Computed in float32, or in float64 where logits are.
"""

import torch
from torch import Tensor

from rlhf_core.algorithms.precision import at_least_float32


def hard_step_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label): cross entropy. logits: (T, K); labels: (T,) long in 0..K-1. Returns (T,)."""
    return -_logprobs(logits).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def soft_step_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-(y * log p(right) + (1 - y) * log p(wrong)). logits: (T, 2); labels y: (T,), P(step is right). Returns (T,)."""
    right, wrong = _logprobs(logits).unbind(-1)
    return -(labels * right + (1 - labels) * wrong)


def right_probability(logits: Tensor) -> Tensor:
    """p(right), the score of a step. logits: (..., K). Returns (...)."""
    return _logprobs(logits)[..., 0].exp()


def _logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(at_least_float32(logits), dim=-1)
