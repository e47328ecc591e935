"""The contract between losses and the engine: objectives are blind to the engine, the engine to objectives."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Batch = dict[str, Tensor]
# (sum, count) by name, summed over micro-batches, ranks and steps before one is divided by the other.
Metrics = dict[str, tuple[Tensor | float, Tensor | float]]


@dataclass(frozen=True)
class Term:
    """One summand of a loss: a sum over what this micro-batch holds, and the coefficient it enters with."""

    numerator: Tensor  # scalar, with gradient
    weight: float = 1.0


@dataclass(frozen=True)
class LossParts:
    """`terms[name]` is divided by the denominator of that name; metrics are (sum, count) pairs, summed everywhere."""

    terms: dict[str, Term]
    metrics: Metrics = field(default_factory=dict)


class Objective(Protocol):
    """What is minimised. The loss of an optimizer step is the sum of weight * (sum of numerators / denominator)."""

    def denominators(self, batch: Batch) -> dict[str, float]:
        """This micro-batch's share of each term's denominator, known without a forward pass."""
        ...

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        """Keyword arguments of the model's forward."""
        ...

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts: ...
