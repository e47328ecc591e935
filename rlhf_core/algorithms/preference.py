"""Losses of direct preference optimisation, for each pair of responses.

A response's log-ratio is log pi(y | x) - log pi_ref(y | x), summed over its tokens. Legend: N pairs.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) * log sigmoid(beta * h) - e * log sigmoid(-beta * h), h = chosen - rejected log-ratio.

    Rafailov et al. 2023, eq. 7; with e > 0, the probability that a label is wrong, cDPO (Mitchell 2023).
    chosen, rejected: (N,). Returns (N,).
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / (2 * beta))^2, h = chosen - rejected log-ratio, each the *mean over the response's tokens*.

    Azar et al. 2023, eq. 17, whose tau is beta. The paper writes sequence log-ratios and does not say how long
    sequences enter; TRL takes the mean over tokens, as its authors report the paper's experiments did. With sums the
    target 1 / (2 * beta) would mean another strength at every length.
    chosen, rejected: (N,). Returns (N,).
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2
