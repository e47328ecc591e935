"""Histograms as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def length_bins(values: Sequence[float], bins: int = 40) -> np.ndarray:
    """(bins + 1,) edges over the lengths, at equal ratios: lengths have long tails."""
    low, high = min(values), max(values)
    return np.geomspace(max(low, 1), max(high, low + 1, 2), bins + 1)


def plot_lengths(path: Path, title: str, lengths: Mapping[str, Sequence[int]], *, xlabel: str) -> None:
    """Draws the lengths of each name, such as training and held-out rows, into one PNG. No window system is needed."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    edges = length_bins([length for values in lengths.values() for length in values])
    for name, values in lengths.items():
        axes.hist(np.maximum(values, 1), bins=edges.tolist(), label=f"{name} ({len(values)})", alpha=0.6)
    axes.set(title=title, xlabel=xlabel, ylabel="rows", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
