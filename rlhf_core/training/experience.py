"""What a rollout becomes before it is trained on. Numpy only, so that Ray hands the arrays over without a copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_core.algorithms.advantages import gae, normalise, token_rewards
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.config.rl import AlgorithmSettings
from rlhf_core.data.batches import model_inputs, pad_right
from rlhf_core.training.objective import Batch


@dataclass(frozen=True, eq=False)
class Scored:
    """One trajectory of R response tokens as the trainer's models see it. All arrays (R,) float32 but for the ids.

    action_mask: bool, True where the policy chose the token. logprobs: of the policy before its update ("old").
    values: of the critic, before its update. reward_score: the reward model's raw score, NaN without one.
    step_scores: (steps,), the probability that each step is right, by the process reward model; None without one.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    action_mask: np.ndarray
    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    values: np.ndarray
    reward_score: float = math.nan
    step_scores: np.ndarray | None = None


@dataclass(frozen=True)
class Experience:
    """A whole rollout, padded: everything (B, R) but `scored`. Advantages and returns are 0 off the action mask."""

    scored: Sequence[Scored]
    advantages: torch.Tensor
    returns: torch.Tensor


def build_experience(scored: Sequence[Scored], rewards: Sequence[float], algorithm: AlgorithmSettings) -> Experience:
    """Advantages and returns of a rollout. Every rank computes them for all trajectories, so none depends on ranks."""
    mask = _padded([s.action_mask for s in scored]).bool()
    kl = kl_estimate(_padded([s.logprobs for s in scored]), _padded([s.ref_logprobs for s in scored]), "k1")
    values = _padded([s.values for s in scored])
    per_token = token_rewards(torch.tensor(rewards, dtype=torch.float32), kl, mask, algorithm.kl_coef)
    advantages, returns = gae(per_token, values, mask, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
    if algorithm.whiten_advantages:
        advantages = normalise(advantages, mask, "mean_std")
    return Experience(scored, advantages, returns)


def experience_batch(experience: Experience, ids: Sequence[int], pad_token_id: int) -> Batch:
    """A micro-batch of trajectories: prompt and response in one row, per-token values where the response lies."""
    scored = [experience.scored[i] for i in ids]
    rows = [np.concatenate([s.prompt_ids, s.response_ids]) for s in scored]
    advantages = [experience.advantages[i, : len(s.response_ids)].numpy() for i, s in zip(ids, scored, strict=True)]
    returns = [experience.returns[i, : len(s.response_ids)].numpy() for i, s in zip(ids, scored, strict=True)]
    heads = [len(s.prompt_ids) for s in scored]
    return {
        **model_inputs([row.tolist() for row in rows], pad_token_id),
        "action_mask": _placed([s.action_mask for s in scored], heads).bool(),
        "old_logprobs": _placed([s.logprobs for s in scored], heads),
        "old_values": _placed([s.values for s in scored], heads),
        "advantages": _placed(advantages, heads),
        "returns": _placed(returns, heads),
    }


def kl_per_token(scored: Sequence[Scored]) -> float:
    """Mean of k1 over all action tokens of a rollout."""
    kl = np.concatenate([(s.logprobs - s.ref_logprobs)[s.action_mask] for s in scored])
    return float(kl.mean())


def _padded(rows: Sequence[np.ndarray]) -> torch.Tensor:
    return pad_right(rows, dtype=torch.float32)  # type: ignore[arg-type]


def _placed(rows: Sequence[np.ndarray], heads: Sequence[int]) -> torch.Tensor:
    """Response rows moved behind their prompts: (B, T)."""
    out = torch.zeros(len(rows), max(head + len(row) for head, row in zip(heads, rows, strict=True)))
    for number, (head, row) in enumerate(zip(heads, rows, strict=True)):
        out[number, head : head + len(row)] = torch.tensor(row, dtype=torch.float32)
    return out
