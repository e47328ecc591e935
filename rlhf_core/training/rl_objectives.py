"""RL's objectives: blind to how advantages were made. Legend: R rows, L columns, M trajectories; rl_batches.py."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.algorithms.kl import kl_loss
from rlhf_core.algorithms.masked import masked_sum, select
from rlhf_core.algorithms.policy_loss import (
    cispo_loss,
    clip_loss,
    denominator,
    sequence_ratio,
    token_ratio,
    token_weights,
)
from rlhf_core.algorithms.value_loss import value_loss
from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.training.batch_views import model_inputs, real_weights
from rlhf_core.training.objective import Batch, LossParts, Metrics, Objective, Term
from rlhf_core.training.objectives_sft import SftObjective

PTX = "ptx"  # in a batch of SFT rows, which distinguishes it from one of trajectories


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss, the KL where it stands in the loss, and the entropy bonus, all aggregated in one way.

    kl_coef: the coefficient now. max_new_tokens: what aggregation `constant` divides by.
    """

    algorithm: AlgorithmSettings
    temperature: float
    kl_coef: float
    max_new_tokens: int

    @property
    def _terms(self) -> list[str]:
        algorithm = self.algorithm
        kl = self.kl_coef > 0 and algorithm.kl.place == "loss"
        return ["policy", *(["kl"] if kl else []), *(["entropy"] if algorithm.entropy_coef else [])]

    def denominators(self, batch: Batch) -> dict[str, float]:
        how = self.algorithm.aggregation
        share = denominator(_actions(batch), batch["segments"], len(batch["real"]), how, self.max_new_tokens)
        return dict.fromkeys(self._terms, share)

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        entropy = {"entropy": True} if self.algorithm.entropy_coef else {}
        return {**model_inputs(batch), "temperature": self.temperature, **entropy}

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        """outputs: log-probs (R, L); with an entropy bonus (2, R, L), entropies behind them."""
        algorithm, mask = self.algorithm, _actions(batch)
        entropy = algorithm.entropy_coef > 0
        # Selected before anything is computed: what stands at other positions must not reach the gradient.
        logprobs = select(outputs[0] if entropy else outputs, mask)
        old = select(batch["old_logprobs"], mask)
        losses, clipped = self._policy_losses(logprobs, old, batch, mask)
        weights = token_weights(mask, batch["segments"], len(batch["real"]), algorithm.aggregation)
        terms = {"policy": Term(masked_sum(losses * select(batch["loss_weights"], mask) * weights, mask))}
        tokens = mask.sum()
        metrics: Metrics = {
            "surrogate": (terms["policy"].numerator.detach(), self.denominators(batch)["policy"]),
            "clipped": (masked_sum(clipped.float(), mask), tokens),
            "approx_kl": (masked_sum((old - logprobs).detach(), mask), tokens),
        }
        if "kl" in self._terms:
            reference, settings = select(batch["ref_logprobs"], mask), algorithm.kl
            kl = kl_loss(logprobs, old, reference, settings.estimator, unbiased_gradient=settings.unbiased_gradient)
            terms["kl"] = Term(masked_sum(kl * weights, mask), self.kl_coef)
            metrics["kl_loss"] = (masked_sum(kl.detach(), mask), tokens)
        if entropy:
            entropies = select(outputs[1], mask)
            terms["entropy"] = Term(masked_sum(entropies * weights, mask), -algorithm.entropy_coef)
            metrics["entropy"] = (masked_sum(entropies.detach(), mask), tokens)
        return LossParts(terms, metrics)

    def _policy_losses(self, logprobs: Tensor, old: Tensor, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(R, L) losses, and where a bound took effect."""
        algorithm, advantages = self.algorithm, select(batch["advantages"], mask)
        bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
        if algorithm.loss == "cispo":
            return cispo_loss(logprobs, token_ratio(logprobs, old), advantages, **bounds)
        if algorithm.loss == "gspo":
            ratio = sequence_ratio(logprobs, old, mask, batch["segments"], len(batch["real"]))
        else:
            ratio = token_ratio(logprobs, old)
        return clip_loss(ratio, advantages, **bounds, dual_clip=algorithm.dual_clip)


@dataclass(frozen=True)
class ValueObjective:
    """Clipped value loss, mean over the action tokens of the optimizer step."""

    algorithm: AlgorithmSettings

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"value": float(_actions(batch).sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        """outputs: (R, L) scores."""
        mask = _actions(batch)
        values = select(state_values(outputs), mask)
        losses, clipped = value_loss(
            values, select(batch["old_values"], mask), select(batch["returns"], mask), clip=self.algorithm.value_clip
        )
        tokens = mask.sum()
        return LossParts(
            {"value": Term(masked_sum(losses, mask))},
            {"value_clipped": (masked_sum(clipped.float(), mask), tokens)},
        )


@dataclass(frozen=True)
class PtxObjective:
    """`objective` on trajectories, plus coef * the mean SFT loss of the rows in batches that have PTX (Ouyang et al.
    2022, eq. 2). Both are means over the optimizer step, each over what it counts itself."""

    objective: Objective
    coef: float

    def denominators(self, batch: Batch) -> dict[str, float]:
        if PTX not in batch:
            return self.objective.denominators(batch)
        return {PTX: SftObjective().denominators(batch)["nll"]}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        """Of SFT rows at temperature 1, whatever that of sampling."""
        return (self.objective if PTX not in batch else SftObjective()).forward_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        if PTX not in batch:
            return self.objective.loss(batch, outputs)
        parts = SftObjective().loss(batch, outputs)
        return LossParts({PTX: replace(parts.terms["nll"], weight=self.coef)}, {"ptx_loss": parts.metrics["nll"]})


def state_values(scores_RL: Tensor) -> Tensor:
    """V of the state in which token t is chosen: the score after token t - 1. (R, L), entry 0 is 0.

    A sample's first token, before which another sample may end, is never an action.
    """
    return torch.nn.functional.pad(scores_RL[:, :-1], (1, 0))


def _actions(batch: Batch) -> Tensor:
    """(R, L) bool: tokens that the policy chose, of items that count."""
    return real_weights(batch, 1) > 0
