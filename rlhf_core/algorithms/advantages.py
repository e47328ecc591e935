"""From rewards to advantages. Legend: B trajectories, T response tokens.

Only action tokens count: t + 1 is the next *action* token, and what stands at other positions enters nothing.
"""

from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["none", "mean", "mean_std"]


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
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over action tokens only (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1};  return_t = A_t + V_t,
    where t+1 is the next *action* token. Decay counts action tokens only.

    rewards, values, action_mask: (B, T). final_values: (B,), V of the state after the last token: 0 where the response
    ended, the critic's value where it was merely cut off (Pardo et al. 2018, partial-episode bootstrapping); None: 0.
    Returns advantages and returns, (B, T), 0 where action_mask is 0.
    """
    mask = action_mask.bool()
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0]) if final_values is None else final_values.to(rewards.dtype)
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


def returns_to_go(rewards: Tensor, action_mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over action tokens (REINFORCE: Williams 1992; Sutton and Barto 2018, eq. 3.9).

    rewards, action_mask: (B, T). Returns (B, T), 0 where action_mask is 0.
    """
    mask = action_mask.bool()
    returns = torch.zeros_like(rewards)
    after = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        after = torch.where(mask[:, t], rewards[:, t] + gamma * after, after)
        returns[:, t] = torch.where(mask[:, t], after, returns[:, t])
    return returns


def normalise(advantages: Tensor, action_mask: Tensor, how: Normalisation, eps: float = 1e-8) -> Tensor:
    """Over all action tokens of a rollout: mean 0 ("mean"), and population standard deviation 1 ("mean_std").

    advantages, action_mask: (B, T). Returns (B, T) in their dtype, 0 where action_mask is 0. Computed in float64, so
    that equal advantages become 0: in float32 what their mean is rounded by, over a deviation of nearly 0, would stay.
    """
    mask = action_mask.bool()
    if how != "none":
        valid = advantages[mask].double()
        scale = torch.rsqrt(valid.var(unbiased=False).clamp(min=eps)) if how == "mean_std" else 1.0
        advantages = ((advantages.double() - valid.mean()) * scale).to(advantages.dtype)
    return torch.where(mask, advantages, torch.zeros_like(advantages))
