"""The load-balancing loss of a mixture of experts, added to any objective."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_core.algorithms.masked import masked_sum
from rlhf_core.training.objective import Batch, LossParts, Objective, Term


@dataclass(frozen=True)
class AuxLossObjective:
    """`objective`, plus coef * the mean of the model's auxiliary loss over all micro-batches that hold something real.

    A router's balance is a function of the tokens it sees together, so unlike all other terms this one depends on how
    the step was cut into micro-batches (Fedus et al. 2022, eq. 4, is defined for a batch).
    """

    objective: Objective
    coef: float

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {**self.objective.denominators(batch), "aux": float(batch["real"].any())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        # The router's balance over real tokens: fill would count as others do.
        return {**self.objective.forward_inputs(batch), "aux_mask": (batch["segments"] >= 0).long()}

    def loss(self, batch: Batch, outputs: Any) -> LossParts:
        """outputs: what the objective reads, and the auxiliary loss (scalar)."""
        values, aux = outputs
        counted = batch["real"].any()
        term = masked_sum(aux, counted)
        parts = self.objective.loss(batch, values)
        return LossParts(
            {**parts.terms, "aux": Term(term, self.coef)},
            {**parts.metrics, "aux": (term.detach(), counted)},
        )
