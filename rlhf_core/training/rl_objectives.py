"""PPO's objectives and the batches they read. Legend: B trajectories, T tokens of prompt and response."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import masked_sum, select
from rlhf_core.algorithms.policy_loss import clip_loss, token_ratio
from rlhf_core.algorithms.value_loss import value_loss
from rlhf_core.config.rl import AlgorithmSettings
from rlhf_core.training.objective import Batch, LossParts, Term


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped policy loss, mean over the action tokens of the optimizer step."""

    algorithm: AlgorithmSettings
    temperature: float

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"policy": float(batch["action_mask"].sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        inputs: dict[str, Tensor | float] = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return {**inputs, "temperature": self.temperature}

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        mask = batch["action_mask"]
        # Selected before anything is computed: what stands at other positions must not reach the gradient.
        logprobs, old = select(outputs, mask), select(batch["old_logprobs"], mask)
        losses, clipped = clip_loss(
            token_ratio(logprobs, old),
            batch["advantages"],
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
        )
        tokens = mask.sum()
        return LossParts(
            {"policy": Term(masked_sum(losses, mask))},
            {
                "clipped": (masked_sum(clipped.float(), mask), tokens),
                "approx_kl": (masked_sum((old - logprobs).detach(), mask), tokens),
            },
        )


@dataclass(frozen=True)
class ValueObjective:
    """Clipped value loss, mean over the action tokens of the optimizer step."""

    algorithm: AlgorithmSettings

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"value": float(batch["action_mask"].sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        mask = batch["action_mask"]
        values = select(state_values(outputs), mask)
        losses, clipped = value_loss(
            values, select(batch["old_values"], mask), select(batch["returns"], mask), clip=self.algorithm.value_clip
        )
        tokens = mask.sum()
        return LossParts(
            {"value": Term(masked_sum(losses, mask))},
            {"value_clipped": (masked_sum(clipped.float(), mask), tokens)},
        )


def state_values(scores_BT: Tensor) -> Tensor:
    """V of the state in which token t is chosen: the score after token t - 1. (B, T), entry 0 is 0."""
    return torch.nn.functional.pad(scores_BT[:, :-1], (1, 0))
