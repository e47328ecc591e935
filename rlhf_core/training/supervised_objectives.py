"""Objectives of SFT and of the reward model, and the batches they read. Legend: B rows, T tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import masked_sum, select
from rlhf_core.algorithms.reward_model import pairwise_sigmoid_loss
from rlhf_core.data.batches import Exchange, model_inputs, response_mask
from rlhf_core.models.scorer import last_token_scores
from rlhf_core.training.objective import Batch, LossParts, Term


def sft_batch(rows: Sequence[Exchange], pad_token_id: int) -> Batch:
    """input_ids, attention_mask (B, T) long; loss_mask (B, T) bool, True on response tokens with their end token."""
    return {**model_inputs([row.ids for row in rows], pad_token_id), "loss_mask": response_mask(rows)}


class SftObjective:
    """Negative log-prob of the response tokens, mean over all of them in the optimizer step."""

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"nll": float(batch["loss_mask"].sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        nll = masked_sum(-outputs, batch["loss_mask"])
        return LossParts({"nll": Term(nll)}, {"nll": (nll.detach(), batch["loss_mask"].sum())})


def pair_batch(pairs: Sequence[tuple[Exchange, Exchange]], pad_token_id: int) -> Batch:
    """(chosen, rejected) pairs as 2B rows: all chosen, then all rejected, in the order of the pairs."""
    rows = [chosen.ids for chosen, _ in pairs] + [rejected.ids for _, rejected in pairs]
    return {**model_inputs(rows, pad_token_id), "weight": torch.ones(len(pairs))}


class PairwiseObjective:
    """Pairwise sigmoid loss, mean over the pairs of the optimizer step. `weight` 0 marks fill that counts nowhere."""

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"pairwise": float(batch["weight"].sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        real = batch["weight"] > 0
        scores = last_token_scores(outputs, batch["attention_mask"])
        chosen, rejected = (select(half, real) for half in scores.chunk(2))
        losses = pairwise_sigmoid_loss(chosen, rejected)
        both = torch.cat([chosen, rejected]).detach()
        real_both = torch.cat([real, real])
        count = real.sum()
        return LossParts(
            {"pairwise": Term(masked_sum(losses, real))},
            {
                "accuracy": ((chosen > rejected).sum(), count),
                "margin": (masked_sum((chosen - rejected).detach(), real), count),
                "score": (masked_sum(both, real_both), 2 * count),
                "score squared": (masked_sum(both.double() ** 2, real_both), 2 * count),
            },
        )
