"""The pipeline's report: what was learned, curves, sample generations, time and reuse of each stage."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.store.artifacts import artifact_path
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.plots import Curve, plot_curves

SAMPLES = 10


@dataclass(frozen=True)
class Report:
    """`markdown` refers to the images by name; all lie in the store below `path`."""

    markdown: str
    path: str
    images: dict[str, bytes]


def write_report(store: Store, manifests: Mapping[str, Manifest], reused: Mapping[str, bool], flow_run: str) -> Report:
    """Makes the report of a finished pipeline from its manifests alone, and puts it into the store."""
    metrics = {node: _records(store, manifests[node]) for node in ("sft", "rm", "ppo")}
    samples = _lines(store, manifests["evaluate"], "samples.jsonl")[:SAMPLES]
    images = _draw(metrics)
    markdown = "\n".join(
        [
            "# What was learned",
            "",
            *_results(manifests),
            "",
            "## Curves",
            "",
            *(f"![{name}]({name})" for name in images),
            "",
            f"## {len(samples)} generations on held-out prompts (greedy)",
            "",
            *_generations(samples),
            "",
            "## Stages",
            "",
            *_stages(manifests, reused),
            "",
        ]
    )
    path = f"reports/{flow_run}"
    for name, content in images.items():
        store.write_bytes(f"{path}/{name}", content)
    store.write_bytes(f"{path}/report.md", markdown.encode())
    return Report(markdown, path, images)


def _results(manifests: Mapping[str, Manifest]) -> list[str]:
    rm, ppo, evaluation = (manifests[node].metrics for node in ("rm", "ppo", "evaluate"))
    rows: list[tuple[str, Any, Any, str]] = [
        ("greedy exact match, held out", evaluation["exact_match/sft"], evaluation["exact_match/ppo"], "%"),
        ("exact match of the rollouts, sampled", ppo["reward/exact/first"], ppo["reward/exact/last"], "%"),
        ("reward of the rollouts", ppo["reward/first"], ppo["reward/last"], ""),
        ("reward model's score, normalised", ppo["reward/rm/first"], ppo["reward/rm/last"], ""),
    ]
    lines = ["| | before PPO | after PPO |", "|---|---|---|"]
    lines += [f"| {what} | {_figure(before, unit)} | {_figure(after, unit)} |" for what, before, after, unit in rows]
    return [
        *lines,
        "",
        f"Reward model: {_figure(rm['eval/accuracy'], '%')} of {rm['eval_rows']} held-out pairs in the right order. "
        f"Sampler and trainer log-probs of the same tokens differ by at most {float(ppo['parity/max']):.1e}.",  # type: ignore[arg-type]
    ]


def _figure(value: Any, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.3f}"


def _generations(samples: list[dict[str, Any]]) -> list[str]:
    lines = ["| prompt | answer | after SFT | after PPO |", "|---|---|---|---|"]
    for row in samples:
        cells = [f"`{row[name]}` {'✓' if row[f'{name} exact'] else '✗'}" for name in ("sft", "ppo")]
        lines.append(f"| `{row['prompt']}` | `{row['label']}` | {cells[0]} | {cells[1]} |")
    return lines


def _stages(manifests: Mapping[str, Manifest], reused: Mapping[str, bool]) -> list[str]:
    lines = ["| stage | key | | seconds |", "|---|---|---|---|"]
    for node, manifest in manifests.items():
        state = "reused" if reused[node] else "made"
        lines.append(f"| {node} | `{manifest.key[:12]}` | {state} | {manifest.wall_seconds or 0:.0f} |")
    return lines


def _draw(metrics: Mapping[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    plots: dict[str, tuple[str, dict[str, Curve]]] = {
        "ppo.png": (
            "PPO: reward and exact match",
            {
                "reward": _curve(metrics["ppo"], "reward"),
                "reward model (normalised)": _curve(metrics["ppo"], "reward/rm"),
                "exact match (sampled)": _curve(metrics["ppo"], "reward/exact"),
                "exact match (greedy, held out)": _curve(metrics["ppo"], "exact_match", "eval"),
            },
        ),
        "sft-rm.png": (
            "SFT loss, RM accuracy",
            {
                "SFT loss": _curve(metrics["sft"], "loss"),
                "RM accuracy": _curve(metrics["rm"], "accuracy"),
                "RM accuracy (held out)": _curve(metrics["rm"], "accuracy", "eval"),
            },
        ),
    }
    with tempfile.TemporaryDirectory() as temp:
        for name, (title, curves) in plots.items():
            plot_curves(Path(temp) / name, title, {label: curve for label, curve in curves.items() if curve[0]})
        return {name: (Path(temp) / name).read_bytes() for name in plots}


def _curve(records: list[dict[str, Any]], name: str, phase: str = "train") -> Curve:
    points = [(record["step"], record[name]) for record in records if record["phase"] == phase and name in record]
    return [step for step, _ in points], [value for _, value in points]


def _records(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    return _lines(store, manifest, "metrics.jsonl")


def _lines(store: Store, manifest: Manifest, file: str) -> list[dict[str, Any]]:
    content = store.read_bytes(f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}/{file}").decode()
    return [json.loads(line) for line in content.removesuffix("\n").split("\n")]
