"""Curves as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = tuple[list[int], list[float]]


def plot_curves(path: Path, title: str, curves: Mapping[str, Curve], *, xlabel: str = "step", ylabel: str = "") -> None:
    """Draws (steps, values) by name into one PNG. No window system is needed."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name, marker="o" if len(steps) < 20 else None, linewidth=1.5)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()
    figure.savefig(path, dpi=110)


def plot_bands(
    path: Path,
    title: str,
    steps: Sequence[int],
    percentiles: Sequence[Sequence[float]],
    *,
    xlabel: str = "step",
    ylabel: str = "",
) -> None:
    """Draws a distribution over steps into a PNG: percentiles from the least value to the largest, an odd number of
    them, each with a value a step. Between equally distant ones lies a band, the darker the nearer to the median."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    middle = len(percentiles) // 2
    for low, high in zip(percentiles[:middle], reversed(percentiles[middle + 1 :]), strict=True):
        axes.fill_between(steps, low, high, color="tab:blue", alpha=0.15, linewidth=0)
    axes.plot(steps, percentiles[middle], color="tab:blue", linewidth=1.5, label="median")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def plot_histogram(
    path: Path, title: str, edges: Sequence[float], counts: Sequence[int], *, xlabel: str = "", ylabel: str = ""
) -> None:
    """Draws counts[i] between edges[i] and edges[i + 1] into a PNG."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(counts, edges, fill=True)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
