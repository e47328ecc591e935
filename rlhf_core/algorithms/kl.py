"""KL divergence of the policy from a reference, estimated from sampled tokens, and its coefficient.

Legend: d = log pi - log pi_ref of the token that pi drew. Estimators k1, k2, k3: Schulman 2020, "Approximating KL
Divergence".
"""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
_LEAST = -20.0  # of d in k3: exp(20) is far beyond what any gradient clipping leaves, exp(89) is no float32
_LARGEST_WEIGHT = 10.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator's value at each token. Any shape.

    k1: d, unbiased for KL(pi, pi_ref), of either sign. k2: d^2 / 2, biased, small variance, never negative.
    k3: exp(-d) - 1 + d, unbiased and never negative; constant below d = -20.

    As a loss, differentiated through `logprobs` on tokens drawn from pi, the mean gradient is that
    of 0 for k1 (it has no use as a loss), of KL(pi, pi_ref) for k2, of KL(pi_ref, pi) for k3: see `kl_loss`.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    d = d.clamp(min=_LEAST)
    return torch.exp(-d) - 1 + d


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: KlEstimator,
    *,
    unbiased_gradient: bool,
) -> Tensor:
    """The estimator's value at each token as a summand of the loss. All of one shape.

    unbiased_gradient: the value stays, and the gradient is w * d * grad log pi with w = pi / pi_old, constant and at
    most 10: on tokens drawn from pi_old its mean is the gradient of KL(pi, pi_ref), whatever the estimator. Without it,
    the estimator's own gradient, which has the mean named in `kl_estimate` while pi = pi_old.
    """
    value = kl_estimate(logprobs, ref_logprobs, estimator)
    if not unbiased_gradient:
        return value
    with torch.no_grad():
        weight = torch.exp(logprobs - old_logprobs).clamp(max=_LARGEST_WEIGHT)
        slope = weight * (logprobs - ref_logprobs)
    surrogate = slope * logprobs
    return value.detach() + surrogate - surrogate.detach()


def adapted_coefficient(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """The coefficient after a rollout of `samples` trajectories whose mean KL was `kl`: higher above the target.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon): Ziegler et al. 2019, section 2.2, with their
    constant 0.1 written as samples / horizon. kl and target are of one unit; horizon counts trajectories.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * samples / horizon)
