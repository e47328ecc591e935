"""Objective of supervised fine-tuning and continued pre-training. Legend: R rows, L columns."""

import torch
from torch import Tensor

from rlhf_core.algorithms.likelihood import weighted_logprobs
from rlhf_core.training.batch_views import model_inputs, real_weights
from rlhf_core.training.objective import Batch, LossParts, Term


class SftObjective:
    """Negative log-prob of the target tokens: mean over the optimizer step, weighted by their weights."""

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"nll": float(real_weights(batch, 1).sum(dtype=torch.float64))}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        """outputs: (R, L) log-probs."""
        weights = real_weights(batch, 1)
        nll = -weighted_logprobs(outputs, weights).sum(dtype=torch.float64)
        return LossParts({"nll": Term(nll)}, {"nll": (nll.detach(), weights.sum(dtype=torch.float64))})
