"""Sampler and trainer give the same weights' tokens different probabilities: how much, and what is done about it.

Legend: B trajectories, T response tokens; z = log pi_trainer - log pi_sampler of a token before any update; w = exp(z).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["off", "token", "sequence"]
Mode = Literal["mask", "clip"]
Statistic = Literal["ratio", "binary_kl", "tv"]
_LARGEST_LOG = 20.0
_LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True)
class Correction:
    """All (B, T). weights: what each token's policy loss is multiplied by, 0 off the action mask. cut: where that is
    not w (a token that was masked, or whose weight was clipped). known: action tokens whose log-probs the sampler gave.
    """

    weights: Tensor
    cut: Tensor
    known: Tensor


def log_ratios(logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(z, known), both (B, T): z is 0 where the token is none of the policy's, or the sampler's log-prob is NaN."""
    known = action_mask.bool() & torch.isfinite(sampler_logprobs)
    return torch.where(known, logprobs - sampler_logprobs, 0.0), known


def correction(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    action_mask: Tensor,
    *,
    level: Level,
    mode: Mode = "mask",
    statistic: Statistic = "ratio",
    low: float = 0.0,
    high: float = 1.0,
) -> Correction:
    """Importance weights against the mismatch. logprobs, sampler_logprobs, action_mask: (B, T).

    off: 1. token, clip: w within [low, high] (TIS: Yao et al. 2025, with low 0). token, mask: w where the statistic
    lies in [low, high], else 0 (IcePop: Ling team 2025). sequence, mask: w of the sequences whose mean statistic lies
    in [low, high], else 0 for all of their tokens (seq-mask-TIS: Liu et al. 2025). sequence, clip: the product of a
    sequence's w, within [low, high], at all of its tokens (sequence-level TIS, same source).

    The mean of the statistic `ratio` over a sequence is the geometric one. binary_kl: KL between taking and not taking
    the token, sampler against trainer; tv: |difference of its probabilities|: both compare with `mask` alone.
    A token whose sampler log-prob is NaN has ratio 1, and no part in a mean.
    """
    mask = action_mask.bool()
    z, known = log_ratios(logprobs, sampler_logprobs, action_mask)
    w = torch.exp(z.clamp(-_LARGEST_LOG, _LARGEST_LOG))
    if level == "off":
        return Correction(mask.to(z.dtype), torch.zeros_like(mask), known)
    if mode == "clip":
        exact = w if level == "token" else torch.exp(z.sum(1, keepdim=True).clamp(-_LARGEST_LOG, _LARGEST_LOG))
        weights = exact.clamp(low, high).expand_as(w)
        cut = weights != exact
    else:
        tested = _statistic(z, logprobs, sampler_logprobs, known, statistic)
        if level == "sequence":
            mean = tested.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
            tested = mean.expand_as(z)
        if statistic == "ratio":
            tested = torch.exp(tested)
        kept = (tested >= low) & (tested <= high)
        weights, cut = torch.where(kept, w, 0.0), ~kept
    return Correction(torch.where(mask, weights, 0.0), cut & mask, known)


def _statistic(z: Tensor, logprobs: Tensor, sampler_logprobs: Tensor, known: Tensor, statistic: Statistic) -> Tensor:
    """(B, T), 0 where not known; of `ratio` its logarithm."""
    if statistic == "ratio":
        return z
    p = torch.where(known, sampler_logprobs, 0.0).exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    q = torch.where(known, logprobs, 0.0).exp().clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    value = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log() if statistic == "binary_kl" else (p - q).abs()
    return torch.where(known, value, 0.0)


def mismatch_metrics(
    logprobs: Tensor, sampler_logprobs: Tensor, action_mask: Tensor, made: Correction
) -> dict[str, float]:
    """mismatch/kl: KL(sampler, trainer) per token by k3, never negative; mismatch/log_ratio: mean of -z, its k1;
    mismatch/cut: share of action tokens whose weight is not w. Without a known token the last alone. All (B, T)."""
    metrics = {"mismatch/cut": float(made.cut.sum() / action_mask.bool().sum().clamp(min=1))}
    z, known = log_ratios(logprobs, sampler_logprobs, action_mask)
    if bool(known.any()):
        valid = z[known].double()
        metrics["mismatch/kl"] = float((torch.expm1(valid) - valid).mean())
        metrics["mismatch/log_ratio"] = float(-valid.mean())
    return metrics
