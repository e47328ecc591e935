"""How long rows or samples are: quantiles and a histogram."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BINS = 20


@dataclass(frozen=True)
class Lengths:
    """In tokens or characters. counts[i] of them have edges[i] <= length < edges[i + 1]."""

    min: int
    median: float
    mean: float
    p95: float
    max: int
    edges: list[int]
    counts: list[int]


def lengths_of(lengths: Sequence[int]) -> Lengths:
    """Of at least one length."""
    of = np.asarray(lengths)
    edges = np.unique(np.linspace(0, of.max() + 1, _BINS + 1).astype(int))
    counts, _ = np.histogram(of, edges)
    return Lengths(
        min=int(of.min()),
        median=float(np.median(of)),
        mean=float(of.mean()),
        p95=float(np.percentile(of, 95)),
        max=int(of.max()),
        edges=edges.tolist(),
        counts=counts.tolist(),
    )
