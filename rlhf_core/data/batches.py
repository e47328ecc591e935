"""The order of the data, and padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class SampleOrder:
    """An endless order of row numbers: one permutation an epoch, a function of (seed, epoch) alone.

    So what comes after a position does not depend on ranks, batch cuts or restarts.
    """

    def __init__(self, rows: int, seed: int):
        if rows < 1:
            raise ValueError(f"rows is {rows}; an order needs at least 1 row")
        self.rows, self.seed = rows, seed
        self._last: tuple[int, np.ndarray] | None = None

    def ids(self, position: int, count: int) -> list[int]:
        """Row numbers at positions `position` to `position + count - 1`."""
        ids: list[int] = []
        while len(ids) < count:
            epoch, offset = divmod(position + len(ids), self.rows)
            ids += self._epoch(epoch)[offset : offset + count - len(ids)].tolist()
        return ids

    def _epoch(self, epoch: int) -> np.ndarray:
        """Of large data sets a permutation takes long: the last one is kept for the calls that follow."""
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return self._last[1]


def chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def pad_right(rows: Sequence[Sequence[int]], value: int = 0, *, dtype: torch.dtype = torch.long) -> Tensor:
    """Rows of different lengths as one tensor (rows, longest), filled with `value` on the right."""
    out = torch.full((len(rows), max(map(len, rows))), value, dtype=dtype)
    for number, row in enumerate(rows):
        out[number, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
