"""The demo's chain run stage by stage through the drivers, without a server: what the benchmarks of learning share.

What the store has is reused, so that a benchmark that was stopped goes on.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import PipelineSettings, load_pipeline, read_pipeline
from rlhf_core.store.artifacts import artifact_path, read_manifest
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.plots import Curve, plot_curves
from stages.plan import PlannedStage, plan_pipeline

PROJECT = Path(__file__).resolve().parents[2]
DEMO = PROJECT / "deployments" / "pipelines" / "demo.yaml"
STORE = PROJECT / ".rlhf" / "bench" / "store"  # one for all benchmarks, so that they share what they have in common


def seeded(seed: int, pipeline: Path) -> list[str]:
    """Every seed of the pipeline but that of the held-out prompts, which stay the same problems."""
    given = read_pipeline(pipeline)
    data = [f"data.{kind}.arithmetic.seed={seed}" for kind in given["data"] if kind != "eval"]
    stages = [f"{stage}.seed={seed}" for stage in ("sft", "sample", "rm", "ppo") if stage in given]
    return [*data, f"sft.model.scratch.seed={seed}", *stages]


def run_chain(
    seed: int, name: str, store_url: str, overrides: list[str], last: str = "evaluate", pipeline: Path = DEMO
) -> dict[str, Manifest]:
    """The manifests of all nodes up to `last`."""
    scratch = Path(store_url).parent / "scratch"
    places = [f"run.store={store_url}", f"run.scratch={scratch}"]
    settings = load_pipeline(pipeline, [*seeded(seed, pipeline), *places, *overrides])
    made: dict[str, Manifest] = {}
    for planned in plan_pipeline(settings):
        made[planned.node] = run_node(planned, settings, made)
        print(f"seed {seed}, {name}: {planned.node} {made[planned.node].wall_seconds:.0f} s", flush=True)
        if planned.node == last:
            break
    return made


def run_node(planned: PlannedStage, settings: PipelineSettings, made: dict[str, Manifest]) -> Manifest:
    store = Store(settings.run.store)
    there = read_manifest(store, planned.stage.name, planned.key.key)
    if there is not None:
        return there
    scratch = Path(settings.run.scratch) / f"{planned.node}-{planned.key.key[:12]}"
    scratch.mkdir(parents=True, exist_ok=True)
    spec = {
        "stage": planned.stage.name,
        "node": planned.node,
        "settings": planned.settings.model_dump(mode="json"),
        "key": planned.key.key,
        "key_source": planned.key.source,
        "inputs": {name: made[node].model_dump(mode="json") for name, node in planned.inputs.items()},
        "run": settings.run.model_dump(mode="json"),
        "scratch": str(scratch),
    }
    (scratch / "spec.json").write_text(json.dumps(spec))
    with (scratch / "driver.log").open("w") as log:
        command = [sys.executable, "-m", planned.stage.module, "--spec", str(scratch / "spec.json")]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    manifest = read_manifest(store, planned.stage.name, planned.key.key)
    if code != 0 or manifest is None:
        raise SystemExit(f"{planned.node} failed with exit code {code}; see {scratch / 'driver.log'}")
    return manifest


def curve(manifest: Manifest, store: Store, phase: str, name: str) -> Curve:
    """(steps, values) of one metric of a finished stage; phase: train or eval."""
    folder = f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}"
    records = [json.loads(line) for line in store.read_bytes(f"{folder}/metrics.jsonl").decode().splitlines()]
    points = [(r["step"], r[name]) for r in records if r["phase"] == phase and name in r]
    return [step for step, _ in points], [value for _, value in points]


def draw_truth(path: Path, title: str, runs: dict[int, Manifest], store: Store) -> None:
    """The reward model's score and the truth, by step, of PPO for each seed: over-optimisation is where they part."""
    curves = {}
    for seed, manifest in runs.items():
        for name, phase, label in (("reward/rm", "train", "RM score"), ("exact_match", "eval", "exact match, greedy")):
            curves[f"{label}, seed {seed}"] = curve(manifest, store, phase, name)
    plot_curves(path, title, curves)


def number(value: Any) -> float:
    return float(value)


def percent(value: Any) -> str:
    return f"{100 * number(value):.1f} %"
