"""What a rollout becomes before it is trained on. Arrays are NumPy's, so that Ray hands them over without a copy.

Legend: B trajectories, T response tokens, R of one trajectory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlhf_core.algorithms.advantages import gae, normalise, returns_to_go, token_rewards
from rlhf_core.algorithms.groups import (
    group_centred,
    group_normalised,
    group_sizes,
    group_spread,
    group_std,
    leave_one_out,
)
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.mismatch import correction, mismatch_metrics
from rlhf_core.algorithms.shaping import RunningMoments, overlong_penalty, truncation_penalised
from rlhf_core.algorithms.step_rewards import StepBaseline, baselined_steps, placed_steps, step_values
from rlhf_core.config.algorithm import AlgorithmSettings, ShapingSettings
from rlhf_core.data.batches import pad_right
from rlhf_core.training.rl_state import RlState


@dataclass(frozen=True, eq=False)
class Scored:
    """One trajectory of R response tokens as the trainer's models see it. All arrays (R,) float32 but for the ids.

    action_mask: bool, True where the policy chose the token. sampler_logprobs: as the sampler gave them, NaN where it
    did not. logprobs: of the policy before its update ("old"); entropy: of its distribution there. ref_logprobs: None
    without a reference. values: of the critic before its update, None without one; final_value: that of the state
    after the last token.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    action_mask: np.ndarray
    sampler_logprobs: np.ndarray
    logprobs: np.ndarray
    entropy: np.ndarray
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    final_value: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """What the models of rewards say of a trajectory. reward_score: the reward model's raw score, NaN without one.

    step_scores: (steps,) float32, the probability that each step is right, None without a process reward model;
    step_ends: where in the response each step's last token is.
    """

    reward_score: float = math.nan
    step_scores: np.ndarray | None = None
    step_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graded:
    """What is known of a trajectory beside its tokens. reward: of the whole mix, before shaping. group: its rollout
    group. truncated: cut off, not ended. step_scores: the probability that each step is right; step_ends: where in the
    response each step's last token is.
    """

    reward: float
    group: int
    truncated: bool = False
    step_scores: Sequence[float] = ()
    step_ends: Sequence[int] = ()


@dataclass(frozen=True)
class Experience:
    """A whole rollout, padded: (B, T), 0 off the action mask. returns: None without a critic. weights: what each
    token's policy loss is multiplied by, against the sampler's mismatch. metrics: of the rollout."""

    scored: Sequence[Scored]
    advantages: Tensor
    returns: Tensor | None
    weights: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def build_experience(
    scored: Sequence[Scored],
    graded: Sequence[Graded],
    algorithm: AlgorithmSettings,
    state: RlState,
    max_new_tokens: int,
) -> Experience:
    """Advantages and returns of a rollout. Every rank computes them for all trajectories, so none depends on ranks.

    state: with this rollout's rewards in its moments already.
    """
    mask = padded([s.action_mask for s in scored]).bool()
    logprobs = padded([s.logprobs for s in scored])
    kl = token_kl(scored, algorithm)
    shaped = shaped_rewards(scored, graded, algorithm.shaping, state.rewards, max_new_tokens)
    groups = torch.tensor([one.group for one in graded])
    scores = _baselined(shaped, groups, algorithm).float()
    kl_coef = state.kl_coef if algorithm.kl.place == "reward" else 0.0
    rewards = token_rewards(scores, kl, mask, kl_coef)
    if algorithm.steps.coef:
        rewards = rewards + algorithm.steps.coef * _step_rewards(graded, mask, algorithm)
    advantages, returns = _advantages(rewards, scored, graded, mask, algorithm)
    sampled = padded([s.sampler_logprobs for s in scored])
    made = correction(logprobs, sampled, mask, **algorithm.mismatch.model_dump())
    metrics = {
        "reward/shaped": float(shaped.mean()),
        "entropy": float(padded([s.entropy for s in scored])[mask].mean()),
        **mismatch_metrics(logprobs, sampled, mask, made),
        **_group_metrics(graded, groups),
        **_kl_metrics(scored),
        "returns": float((advantages if returns is None else returns)[mask].double().mean()),
        **_value_metrics(scored, returns, mask),
    }
    return Experience(scored, normalise(advantages, mask, algorithm.normalise), returns, made.weights, metrics)


def shaped_rewards(
    scored: Sequence[Scored],
    graded: Sequence[Graded],
    shaping: ShapingSettings,
    moments: RunningMoments,
    max_new_tokens: int,
) -> Tensor:
    """(B,) float64: rewards normalised, clipped, penalised for being cut off and for their length, in this order."""
    rewards = torch.tensor([one.reward for one in graded], dtype=torch.float64)
    if shaping.normalise:
        rewards = moments.normalised(rewards)
    if shaping.clip is not None:
        rewards = rewards.clamp(*shaping.clip)
    truncated = torch.tensor([one.truncated for one in graded])
    rewards = truncation_penalised(rewards, truncated, shaping.truncation)
    buffer = round(shaping.overlong_share * max_new_tokens)
    if buffer:
        lengths = torch.tensor([int(s.action_mask.sum()) for s in scored])
        factor = shaping.overlong_factor
        rewards = rewards + overlong_penalty(lengths, max_len=max_new_tokens, buffer=buffer, factor=factor)
    return rewards


def token_kl(scored: Sequence[Scored], algorithm: AlgorithmSettings) -> Tensor:
    """(B, T): the estimator's value at each token, 0 without a reference."""
    logprobs = padded([s.logprobs for s in scored])
    references = [s.ref_logprobs for s in scored]
    known = [reference for reference in references if reference is not None]
    if len(known) < len(references):
        return torch.zeros_like(logprobs)
    return kl_estimate(logprobs, padded(known), algorithm.kl.estimator)


def trajectory_kl(scored: Sequence[Scored]) -> float:
    """Mean over trajectories of the sum of k1 over their action tokens: what `kl.target` is compared with."""
    return float(np.mean([kl.sum(dtype=np.float64) for kl in _own_kl(scored)]))


def _own_kl(scored: Sequence[Scored]) -> list[np.ndarray]:
    """k1 of each trajectory's action tokens; nothing without a reference."""
    return [(s.logprobs - s.ref_logprobs)[s.action_mask] for s in scored if s.ref_logprobs is not None]


def _baselined(shaped: Tensor, groups: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """(B,): what of each reward the estimator puts at the last token."""
    if algorithm.estimator in ("reinforce_baseline", "dr_grpo"):
        return group_centred(shaped, groups)
    if algorithm.estimator == "rloo":
        return leave_one_out(shaped, groups)
    return group_normalised(shaped, groups) if algorithm.estimator == "group_norm" else shaped


def _step_rewards(graded: Sequence[Graded], mask: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """(B, T). Where a response's reward has its group's baseline, steps have one too."""
    baselines: dict[str, StepBaseline] = {"gae": "none", "reinforce": "none", "group_norm": "normalised"}
    values = [step_values(one.step_scores, algorithm.steps.form) for one in graded]
    groups = [one.group for one in graded]
    left = baselined_steps(values, groups, baselines.get(algorithm.estimator, "centred"))
    return placed_steps(left, [one.step_ends for one in graded], mask)


def _advantages(
    rewards: Tensor, scored: Sequence[Scored], graded: Sequence[Graded], mask: Tensor, algorithm: AlgorithmSettings
) -> tuple[Tensor, Tensor | None]:
    """Advantages and, with a critic, returns: (B, T), not normalised yet."""
    if not algorithm.needs_critic:
        return returns_to_go(rewards, mask, gamma=algorithm.gamma), None
    final = torch.zeros(len(scored))
    if algorithm.bootstrap_truncated:
        final = torch.tensor([s.final_value * o.truncated for s, o in zip(scored, graded, strict=True)])
    return gae(
        rewards,
        padded([_values(s) for s in scored]),
        mask,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        final_values=final,
    )


def _values(scored: Scored) -> np.ndarray:
    if scored.values is None:
        raise ValueError("estimator gae wants the critic's values, and this rollout was scored without a critic")
    return scored.values


def _group_metrics(graded: Sequence[Graded], groups: Tensor) -> dict[str, float]:
    """Of raw rewards. alone: groups of one trajectory, whose baseline is itself; short: smaller than the largest."""
    rewards = torch.tensor([one.reward for one in graded], dtype=torch.float64)
    spread, sizes = group_spread(rewards, groups), group_sizes(groups)
    return {
        "groups/spread": float(spread.mean()),
        "groups/std": float(group_std(rewards, groups).mean()),
        "groups/equal": float((spread == 0).double().mean()),
        "groups/alone": float((sizes == 1).sum()),
        "groups/short": float((sizes < sizes.max()).sum()),
    }


def _kl_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """k1: mean over action tokens, and of the sums over trajectories. Nothing without a reference."""
    own = _own_kl(scored)
    return {"kl": float(np.concatenate(own).mean()), "kl/trajectory": trajectory_kl(scored)} if own else {}


def _value_metrics(scored: Sequence[Scored], returns: Tensor | None, mask: Tensor) -> dict[str, float]:
    """Explained variance of the returns by the values before the update. Nothing without a critic."""
    if returns is None:
        return {}
    values, wanted = padded([_values(s) for s in scored])[mask].double(), returns[mask].double()
    variance = float(wanted.var(unbiased=False))
    left = float((wanted - values).var(unbiased=False))
    return {
        "values": float(values.mean()),
        "explained_variance": 1.0 - left / variance if variance > 0 else 0.0,
    }


def padded(rows: Sequence[np.ndarray]) -> Tensor:
    """(B, T) float32, 0 behind each row's end."""
    return pad_right(rows, dtype=torch.float32)  # type: ignore[arg-type]
