"""Objective of the reward model. Legend: R rows, L columns, N pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.masked import masked_sum, select
from rlhf_core.algorithms.reward_model import centering_penalty, pairwise_log_exp_loss, pairwise_sigmoid_loss
from rlhf_core.algorithms.segments import last_in_segment
from rlhf_core.config.supervised import RmSettings
from rlhf_core.training.batch_views import model_inputs
from rlhf_core.training.objective import Batch, LossParts, Metrics, Term


@dataclass(frozen=True)
class RmObjective:
    """Pairwise loss, mean over the pairs of the optimizer step. Items are (chosen, rejected), scalar `margin` if used.

    Mean and standard deviation of scores follow from the metrics `score` and `score squared`.
    """

    settings: RmSettings

    def denominators(self, batch: Batch) -> dict[str, float]:
        pairs = float(batch["real"].sum())
        return {"pairwise": pairs, "centering": pairs} if self.settings.centering_coef else {"pairwise": pairs}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        """outputs: (R, L), a score at every token; that of a sequence stands at its last."""
        real = batch["real"] > 0
        scores = last_in_segment(outputs, batch["segments"], 2 * len(real)).view(-1, 2)
        chosen, rejected = (select(side, real) for side in scores.unbind(dim=1))
        terms = {"pairwise": Term(masked_sum(self._pairwise(batch, chosen, rejected), real))}
        if self.settings.centering_coef:
            penalty = masked_sum(centering_penalty(chosen, rejected), real)
            terms["centering"] = Term(penalty, self.settings.centering_coef)
        return LossParts(terms, _score_metrics(chosen.detach().double(), rejected.detach().double(), real))

    def _pairwise(self, batch: Batch, chosen: Tensor, rejected: Tensor) -> Tensor:
        if self.settings.loss == "log_exp":
            return pairwise_log_exp_loss(chosen, rejected)
        return pairwise_sigmoid_loss(chosen, rejected, batch["margin"] if self.settings.use_margin else None)


def _score_metrics(chosen: Tensor, rejected: Tensor, real: Tensor) -> Metrics:
    """A pair with equal scores counts as wrong. chosen, rejected: (N,), 0 for pairs that are not real."""
    pairs = real.sum()
    both = torch.cat([chosen, rejected])
    return {
        "accuracy": ((chosen > rejected).sum(), pairs),
        "margin": ((chosen - rejected).sum(), pairs),
        "score": (both.sum(), 2 * pairs),
        "score squared": ((both**2).sum(), 2 * pairs),
    }
