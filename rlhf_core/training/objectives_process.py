"""Objective of the process reward model. Legend: R rows, L columns, K reward tokens, T steps of a micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.process_reward import hard_step_loss, right_probability, soft_step_loss
from rlhf_core.algorithms.segments import number_in_segment
from rlhf_core.config.supervised import PrmSettings
from rlhf_core.training.batch_views import model_inputs, real_weights
from rlhf_core.training.objective import Batch, LossParts, Metrics, Term

# Steps are reported by their number in the solution; those from the ninth on together.
POSITIONS = (*map(str, range(1, 9)), "9+")
BINS = 10


@dataclass(frozen=True)
class PrmObjective:
    """Cross entropy of the verdicts, mean over the steps of the optimizer step.

    A step's target stands where its weight does, at its placeholder: `labels` there is the index of a reward token
    (hard) or the probability that the step is right (soft).
    """

    settings: PrmSettings

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"nll": float(real_weights(batch, 1).sum(dtype=torch.float64))}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        """outputs: (R, L, K) logits of the reward tokens."""
        weights_RL = real_weights(batch, 1)
        targets = weights_RL > 0
        # Only the targets are picked: what stands at other positions, NaN too, has no part in the gradient.
        weights, labels, logits = weights_RL[targets], batch["labels"][targets], outputs[targets]
        numbers = number_in_segment(targets, batch["segments"], len(batch["real"]))[targets]
        hard = self.settings.labels == "hard"
        losses = hard_step_loss(logits, labels.long()) if hard else soft_step_loss(logits, labels)
        nll = (weights * losses).sum(dtype=torch.float64)
        chosen = labels.long() if hard else (labels < 0.5).long()
        steps = _Steps(
            number=numbers.cpu(),
            weight=weights.cpu().double(),
            probability=right_probability(logits.detach()).cpu().double(),
            label=(labels == 0).cpu().double() if hard else labels.cpu().double(),
            correct=(logits.argmax(dim=-1) == chosen).cpu().double(),
        )
        return LossParts({"nll": Term(nll)}, {"nll": (nll.detach(), weights.sum()), **steps.metrics()})


@dataclass(frozen=True)
class _Steps:
    """What is reported of T steps: each (T,), on the CPU, where the many small sums cost one transfer."""

    number: Tensor
    weight: Tensor
    probability: Tensor  # that the step is right, as predicted
    label: Tensor  # the same, as labelled
    correct: Tensor

    def metrics(self) -> Metrics:
        """Every name every time, since the ranks of a step have to agree on them."""
        steps = self.weight.sum().item()
        places = self.number.clamp(max=len(POSITIONS)) - 1
        # The bin of a NaN does not matter, it shows in whatever bin.
        bins = (self.probability.nan_to_num() * BINS).long().clamp(max=BINS - 1)
        by_bin = self._sums(bins, BINS, torch.ones_like(self.weight))
        return {
            "accuracy": ((self.weight * self.correct).sum().item(), steps),
            **self._table("step accuracy", POSITIONS, places, self.correct),
            **self._table("step probability", POSITIONS, places, self.probability),
            **self._table("step label", POSITIONS, places, self.label),
            **self._table("bin probability", range(BINS), bins, self.probability),
            **self._table("bin label", range(BINS), bins, self.label),
            **{f"bin share/{number}": (total, steps) for number, total in enumerate(by_bin)},
        }

    def _table(self, name: str, keys: range | tuple[str, ...], index: Tensor, values: Tensor) -> Metrics:
        """(sum, count) of the values of each group; index: (T,), the number of its key."""
        sums = self._sums(index, len(keys), values)
        counts = self._sums(index, len(keys), torch.ones_like(values))
        return {f"{name}/{key}": pair for key, pair in zip(keys, zip(sums, counts, strict=True), strict=True)}

    def _sums(self, index: Tensor, groups: int, values: Tensor) -> list[float]:
        return torch.bincount(index, weights=self.weight * values, minlength=groups).tolist()


def calibration_error(means: Mapping[str, float]) -> float:
    """Expected calibration error of P(right): the sum over bins of share * |mean probability - mean label|.

    Guo et al. 2017, eq. 3, with ten bins of equal width. means: the metrics of `PrmObjective`, each divided by its
    count; bins without a step may be missing.
    """
    return sum(
        means[f"bin share/{number}"] * abs(means[f"bin probability/{number}"] - means[f"bin label/{number}"])
        for number in range(BINS)
        if f"bin probability/{number}" in means
    )
