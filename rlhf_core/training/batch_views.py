"""What the supervised objectives read from a batch of rlhf_core/data/layout.py.

Legend: R rows, L columns, N items, S samples of each item.
"""

import torch
from torch import Tensor

from rlhf_core.algorithms.likelihood import weighted_logprobs
from rlhf_core.algorithms.segments import segment_sums
from rlhf_core.training.objective import Batch


def model_inputs(batch: Batch) -> dict[str, Tensor | float]:
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}


def real_weights(batch: Batch, samples_per_item: int) -> Tensor:
    """(R, L): `weights`, which are 0 on fill, and 0 on every token of an item that is not real."""
    item = batch["segments"].clamp(min=0) // samples_per_item
    return torch.where(batch["real"][item] > 0, batch["weights"], 0.0)


def sample_logprobs(batch: Batch, logprobs: Tensor, samples_per_item: int) -> Tensor:
    """(N, S) float64: the weighted sum of each sample's log-probs, 0 for items that are not real. logprobs: (R, L).

    Those of a reference model, computed once before training, are these as well: its outputs on the same batches.
    """
    weights = real_weights(batch, samples_per_item)
    return _by_item(weighted_logprobs(logprobs, weights), batch, samples_per_item)


def sample_weights(batch: Batch, samples_per_item: int) -> Tensor:
    """(N, S) float64: the sum of each sample's weights, 1 where there is none, so that one can divide by it."""
    sums = _by_item(real_weights(batch, samples_per_item), batch, samples_per_item)
    return torch.where(sums > 0, sums, 1.0)


def _by_item(values: Tensor, batch: Batch, samples_per_item: int) -> Tensor:
    items = len(batch["real"])
    return segment_sums(values, batch["segments"], items * samples_per_item).view(items, samples_per_item)
