"""How the items of one optimizer step lie in memory: dealt to ranks, cut into micro-batches, packed or padded.

None of it changes what a step computes: the engine divides by denominators of the whole step (training/objective.py).
Legend: R rows, L columns, N items, S samples per item.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlhf_core.data.samples import Item, Sample

# A micro-batch: rows of item numbers. A packed row holds several items; otherwise an item has a row for each sample.
MicroBatch = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """micro_batch_size: items a rank puts through at once or, with packing, rows of `capacity` tokens.

    multiple: rows are filled up to a multiple of this many tokens (sequence parallel ranks share them evenly).
    """

    ranks: int
    micro_batch_size: int
    packing: bool
    capacity: int
    multiple: int = 1


def plan_step(lengths: Sequence[int], layout: Layout) -> list[list[MicroBatch]]:
    """Micro-batches of each rank for items of `lengths` tokens: the same number on every rank, none of another's items.

    A rank that runs out of items gets micro-batches without any, to be filled with an item of no weight: every rank
    makes the same collective calls. Longest first, so that what does not fit in memory shows in the first step; items
    of similar length share a micro-batch and a turn, so that little is padding and no rank waits for another.
    """
    if layout.packing:
        rows = pack(lengths, layout.capacity)
        tokens = [sum(lengths[item] for item in row) for row in rows]
        order = sorted(range(len(rows)), key=lambda number: (-tokens[number], number))
        units = [rows[number] for number in order]
    else:
        units = [[item] for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))]
    turn = layout.ranks * layout.micro_batch_size
    plan: list[list[MicroBatch]] = [[] for _ in range(layout.ranks)]
    for start in range(0, len(units), turn):
        part = units[start : start + turn]
        for rank in range(layout.ranks):
            plan[rank].append(part[rank :: layout.ranks])
    return plan


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: each item, the longest first, goes into the row that it fills best. Rows of item numbers.

    At most 11/9 of the fewest rows possible, plus one (Johnson 1973). Raises ValueError for an item above `capacity`.
    """
    rows: list[list[int]] = []
    gaps: list[tuple[int, int]] = []  # (free tokens, row number), ascending
    for item in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if lengths[item] > capacity:
            raise ValueError(f"item {item} has {lengths[item]} tokens, and a row holds {capacity}")
        found = bisect_left(gaps, (lengths[item], -1))
        if found < len(gaps):
            free, row = gaps.pop(found)
            rows[row].append(item)
        else:
            free, row = capacity, len(rows)
            rows.append([item])
        insort(gaps, (free - lengths[item], row))
    return rows


def fill_rate(steps: Sequence[Sequence[int]], capacity: int) -> float:
    """Share of the positions of packed rows that hold a token. steps: the lengths of each optimizer step's items."""
    rows = sum(len(pack(lengths, capacity)) for lengths in steps)
    return sum(map(sum, steps)) / (rows * capacity)


def make_batch(items: Sequence[Item], micro: MicroBatch, layout: Layout, pad_token_id: int) -> dict[str, Tensor]:
    """A micro-batch of `items` as tensors; without any item, that of items[0] with no weight.

    input_ids, position_ids, segments (R, L) long: positions restart with each sample; segments number the samples of
    this micro-batch (sample s of its i-th item is i * S + s), -1 on fill. weights (R, L) float32, 0 on fill. labels
    (R, L) float32 where the samples have them. real (N,) float32: 0 for an item of no weight. Each scalar (N,) float32.
    """
    real = bool(micro)
    rows = micro if real else [[0]]
    chosen = [items[number] for row in rows for number in row]
    size = len(chosen[0].samples)
    counts = [len(row) * size for row in rows] if layout.packing else [1] * (len(rows) * size)
    samples = [sample for item in chosen for sample in item.samples]
    numbered = _split(list(enumerate(samples)), counts)
    longest = max(sum(len(sample) for _, sample in row) for row in numbered)
    columns = -(-longest // layout.multiple) * layout.multiple
    batch = _token_tensors(numbered, columns, pad_token_id, restart=layout.packing)
    if not real:
        batch["weights"].zero_()
    batch["real"] = torch.full((len(chosen),), float(real))
    for name in chosen[0].scalars:
        batch[name] = torch.tensor([item.scalars[name] for item in chosen], dtype=torch.float32)
    return batch


def _split(items: list[tuple[int, Sample]], counts: Sequence[int]) -> list[list[tuple[int, Sample]]]:
    ends = np.cumsum([0, *counts])
    return [items[first:last] for first, last in pairwise(ends)]


def _token_tensors(
    rows: Sequence[Sequence[tuple[int, Sample]]], columns: int, pad_token_id: int, *, restart: bool
) -> dict[str, Tensor]:
    """Fill goes on counting positions, as one sequence that ends in padding, unless `restart`s isolate samples."""
    shape = (len(rows), columns)
    ids = np.full(shape, pad_token_id, dtype=np.int64)
    positions = np.broadcast_to(np.arange(columns), shape).copy()
    segments = np.full(shape, -1, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    labelled = rows[0][0][1].labels is not None
    labels = np.zeros(shape, dtype=np.float32)
    for number, row in enumerate(rows):
        at = 0
        for segment, sample in row:
            span = slice(at, at + len(sample))
            ids[number, span] = sample.ids
            positions[number, span] = np.arange(len(sample))
            segments[number, span] = segment
            weights[number, span] = sample.weights
            if labelled:
                labels[number, span] = sample.labels
            at += len(sample)
        if restart:
            positions[number, at:] = np.arange(columns - at)
    tensors = {"input_ids": ids, "position_ids": positions, "segments": segments, "weights": weights}
    if labelled:
        tensors["labels"] = labels
    return {name: torch.from_numpy(array) for name, array in tensors.items()}
