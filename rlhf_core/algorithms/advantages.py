"""From rewards to advantages. Legend: B trajectories, T response tokens."""

import torch
from torch import Tensor


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 = log pi - log pi_ref of the sampled token: unbiased for KL(pi, pi_ref) (Schulman 2020). Any shape."""
    return logprobs - ref_logprobs


def token_rewards(scores: Tensor, kl: Tensor, action_mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * KL at each action token, plus the score at the last one (Ouyang et al. 2022, eq. 2).

    scores: (B,). kl, action_mask: (B, T). Returns (B, T), 0 where action_mask is 0.
    Raises ValueError for a row without an action token: it has no place for its score.
    """
    mask = action_mask.bool()
    if not bool(mask.any(dim=1).all()):
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"trajectories {empty} have no action token, so their score has no place")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).max(dim=1).values
    rewards = torch.where(mask, -kl_coef * kl, torch.zeros_like(kl))
    return rewards.scatter_add(1, last.unsqueeze(1), scores.to(rewards.dtype).unsqueeze(1))


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over action tokens only (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1};  return_t = A_t + V_t,
    where t+1 is the next *action* token, and V after the last one is 0. What stands at other positions does not
    enter, and decay counts action tokens only.

    rewards, values, action_mask: (B, T). Returns advantages and returns, (B, T), 0 where action_mask is 0.
    """
    mask = action_mask.bool()
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0])
    next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(here, advantage, advantages[:, t])
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def whiten(advantages: Tensor, action_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Mean 0 and population standard deviation 1 over all action tokens of a rollout; 0 elsewhere."""
    mask = action_mask.bool()
    valid = advantages[mask]
    scaled = (advantages - valid.mean()) * torch.rsqrt(valid.var(unbiased=False).clamp(min=eps))
    return torch.where(mask, scaled, torch.zeros_like(scaled))
