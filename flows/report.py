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
from stages.evaluate import policies
from stages.ppo_shown import generations_table

SAMPLES = 10


@dataclass(frozen=True)
class Report:
    """`markdown` refers to the images by name; all lie in the store below `path`."""

    markdown: str
    path: str
    images: dict[str, bytes]


def write_report(store: Store, manifests: Mapping[str, Manifest], reused: Mapping[str, bool], flow_run: str) -> Report:
    """Makes the report of a finished pipeline from its manifests alone, and puts it into the store."""
    images = _draw({node: _records(store, manifests[node]) for node in _CURVES if node in manifests})
    sections = [("What was learned", _results(manifests)), ("Curves", [f"![{name}]({name})" for name in images])]
    if "evaluate" in manifests:
        samples = _lines(store, manifests["evaluate"], "samples.jsonl")[:SAMPLES]
        title = f"{len(samples)} generations on held-out prompts (greedy)"
        sections.append((title, _generations(samples, policies(manifests["evaluate"].inputs))))
    if "ppo" in manifests:
        kept = generations_table(_lines(store, manifests["ppo"], "generations.jsonl"))
        sections.append(("The same prompts while PPO trained (greedy)", kept.splitlines()))
    sections.append(("Stages", _stages(manifests, reused)))
    markdown = "\n".join("\n".join([f"## {title}", "", *lines, ""]) for title, lines in sections if lines)
    path = f"reports/{flow_run}"
    for name, content in images.items():
        store.write_bytes(f"{path}/{name}", content)
    store.write_bytes(f"{path}/report.md", markdown.encode())
    return Report(markdown, path, images)


def _results(manifests: Mapping[str, Manifest]) -> list[str]:
    lines = [*_before_and_after(manifests["ppo"].metrics), ""] if "ppo" in manifests else []
    for node, sentence in _HELD_OUT.items():
        metrics = manifests[node].metrics if node in manifests else {}
        if "eval/accuracy" in metrics:
            lines.append(sentence.format(share=_figure(metrics["eval/accuracy"], "%"), rows=metrics["eval_rows"]))
    if "ppo" in manifests:
        largest = float(manifests["ppo"].metrics["parity/max"])  # type: ignore[arg-type]
        lines.append(f"Sampler and trainer log-probs of the same tokens differ by at most {largest:.1e}.")
    if "evaluate" in manifests:
        metrics, names = manifests["evaluate"].metrics, policies(manifests["evaluate"].inputs)
        shares = [f"{name} {_figure(metrics[f'exact_match/{name}'], '%')}" for name in names]
        lines.append(f"Greedy exact match on {metrics['prompts']} held-out prompts: {', '.join(shares)}.")
    return lines


_HELD_OUT = {
    "rm": "Reward model: {share} of {rows} held-out pairs in the right order.",
    "prm": "Process reward model: {share} of the steps of {rows} held-out solutions judged rightly.",
    "dpo": "DPO: {share} of {rows} held-out pairs with the chosen response's reward above the rejected one's.",
}


def _before_and_after(ppo: Mapping[str, Any]) -> list[str]:
    rows = [
        ("greedy exact match, held out", "exact_match", "%"),
        ("exact match of the rollouts, sampled", "reward/exact", "%"),
        ("reward of the rollouts", "reward", ""),
        ("reward model's score, normalised", "reward/rm", ""),
        ("process reward model's verdict", "reward/prm", "%"),
    ]
    return [
        "| | before PPO | after PPO |",
        "|---|---|---|",
        *(
            f"| {what} | {_figure(ppo[f'{name}/first'], unit)} | {_figure(ppo[f'{name}/last'], unit)} |"
            for what, name, unit in rows
            if f"{name}/first" in ppo
        ),
    ]


def _figure(value: Any, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.3f}"


def _generations(samples: list[dict[str, Any]], policies: list[str]) -> list[str]:
    titles = " | ".join(f"after {name.upper()}" for name in policies)
    lines = [f"| prompt | answer | {titles} |", "|---" * (2 + len(policies)) + "|"]
    for row in samples:
        cells = [f"`{row[name]}` {'✓' if row[f'{name} exact'] else '✗'}" for name in policies]
        lines.append(f"| `{row['prompt']}` | `{row['label']}` | {' | '.join(cells)} |")
    return lines


def _stages(manifests: Mapping[str, Manifest], reused: Mapping[str, bool]) -> list[str]:
    lines = ["| stage | key | | seconds |", "|---|---|---|---|"]
    for node, manifest in manifests.items():
        state = "reused" if reused[node] else "made"
        lines.append(f"| {node} | `{manifest.key[:12]}` | {state} | {manifest.wall_seconds or 0:.0f} |")
    return lines


def _draw(metrics: Mapping[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    """A PNG for PPO and one for what came before it, of the nodes that `metrics` has. No file for no curve."""
    images: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as temp:
        for name, (title, nodes) in _PLOTS.items():
            curves = {
                label: _curve(metrics[node], metric, phase)
                for node in nodes
                if node in metrics
                for label, metric, phase in _CURVES[node]
            }
            drawn = {label: curve for label, curve in curves.items() if curve[0]}
            if drawn:
                plot_curves(Path(temp) / name, title, drawn)
                images[name] = (Path(temp) / name).read_bytes()
    return images


_PLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo.png": ("PPO: reward and exact match", ("ppo",)),
    "supervised.png": ("Before PPO: SFT's loss, the others' accuracy", ("sft", "rm", "prm", "dpo", "kto")),
}
# Node -> (label, metric, phase) of each curve.
_CURVES: dict[str, list[tuple[str, str, str]]] = {
    "ppo": [
        ("reward", "reward", "train"),
        ("reward model (normalised)", "reward/rm", "train"),
        ("process reward model", "reward/prm", "train"),
        ("exact match (sampled)", "reward/exact", "train"),
        ("exact match (greedy, held out)", "exact_match", "eval"),
    ],
    "sft": [("SFT loss", "loss", "train")],
    **{
        node: [
            (f"{node.upper()} accuracy", "accuracy", "train"),
            (f"{node.upper()} accuracy (held out)", "accuracy", "eval"),
        ]
        for node in ("rm", "prm", "dpo")
    },
    "kto": [
        ("KTO reward of good responses", "rewards/desirable", "train"),
        ("KTO reward of bad responses", "rewards/undesirable", "train"),
    ],
}


def _curve(records: list[dict[str, Any]], name: str, phase: str = "train") -> Curve:
    points = [(record["step"], record[name]) for record in records if record["phase"] == phase and name in record]
    return [step for step, _ in points], [value for _, value in points]


def _records(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    return _lines(store, manifest, "metrics.jsonl")


def _lines(store: Store, manifest: Manifest, file: str) -> list[dict[str, Any]]:
    content = store.read_bytes(f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}/{file}").decode()
    return [json.loads(line) for line in content.split("\n")[:-1]]
