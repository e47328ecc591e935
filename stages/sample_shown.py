"""What the stage sample says of its samples: metrics, data_report.json, plots, the summary for the UI."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config.sampling import SampleSettings
from rlhf_core.data.lengths import lengths_of
from rlhf_core.data.report import example_lines, plot_lengths, row_lengths
from rlhf_core.data.rows import Row

if TYPE_CHECKING:
    from rlhf_core.rollout.drawings import Drawing
    from rlhf_core.rollout.offline_scores import Scores

_BINS = 20


def sample_metrics(
    settings: SampleSettings,
    prompts: Sequence[Any],
    drawings: "Sequence[Drawing]",
    scores: "Scores",
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """reward: mean over the samples that have one; reward/best: of each prompt's best; reward/<source>: before its
    weight. Counts as they are named."""
    each = settings.samples_per_prompt
    totals = [total for total in scores.totals if total is not None]
    groups = [scores.totals[at : at + each] for at in range(0, len(scores.totals), each)]
    best = [max(known) for group in groups if (known := [one for one in group if one is not None])]
    values: dict[str, list[float]] = {}
    for by_source in scores.values:
        for name, value in by_source.items():
            values.setdefault(name, []).append(value)
    return {
        "prompts": len(prompts),
        "samples": len(drawings),
        "samples_truncated": sum(one.truncated for one in drawings),
        "samples_without_reward": len(drawings) - len(totals),
        "response_tokens": float(np.mean([len(one.ids) for one in drawings])),
        **({"reward": float(np.mean(totals)), "reward/best": float(np.mean(best))} if totals else {}),
        **{f"reward/{name}": float(np.mean(own)) for name, own in values.items()},
        **scores.metrics,
        **counts,
    }


def sample_report(
    settings: SampleSettings, rows: Sequence[Row], held_out: Sequence[Row], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """As prepare-data's: the counts, lengths in characters, an example."""
    return {
        "dataset": settings.kind,
        "form": settings.form,
        "rows": len(rows),
        "eval_rows": len(held_out),
        "metrics": dict(metrics),
        "characters": asdict(lengths_of(row_lengths(rows))),
        "example": rows[0],
    }


def write_plots(files: Path, report: dict[str, Any], scores: "Scores") -> None:
    from rlhf_core.tracking.plots import plot_histogram

    plot_lengths(files / "plots" / "lengths.png", report)
    counts, edges = np.histogram([total for total in scores.totals if total is not None], _BINS)
    path = files / "plots" / "rewards.png"
    title = f"{report['metrics']['samples']} samples of {report['metrics']['prompts']} prompts"
    plot_histogram(path, title, edges.tolist(), counts.tolist(), xlabel="reward", ylabel="samples")


def summary(report: dict[str, Any]) -> str:
    """What the UI shows of a report."""
    metrics, lengths = report["metrics"], report["characters"]
    rewards = "no sample has a reward"
    if "reward" in metrics:
        best = f"of the best of each prompt **{metrics['reward/best']:.3f}**"
        rewards = f"mean reward **{metrics['reward']:.3f}**, {best}"
    lines = [
        f"**{report['form']}**: {report['rows']} rows, {report['eval_rows']} held out, of {metrics['samples']} samples "
        f"of {metrics['prompts']} prompts; {rewards}; {lengths['min']} / {lengths['median']:.10g} / {lengths['max']} "
        "characters (min / median / max)",
        "",
        "| | |",
        "|---|---|",
        *(f"| `{name}` | {value:.6g} |" for name, value in metrics.items()),
        "",
        *example_lines(report["example"]),
    ]
    return "\n".join(lines) + "\n"
