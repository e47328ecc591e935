"""What a supervised stage exports: the best evaluation's weights, an export with each training checkpoint, averages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline

pytestmark = pytest.mark.engines

SMALL = [
    "data.sft.arithmetic={rows: 64, eval_rows: 10}",
    "sft.batch_size=16",
    "sft.max_steps=6",
    "sft.eval_steps=2",
    # The loss falls, so the first evaluation has the highest: what is exported is not what training ended with.
    "sft.best_metric=loss",
    "sft.best_is=higher",
    "sft.trainer={ranks: 2, micro_batch_size: 8, save_steps: 3, keep_checkpoints: 1, save_hf: true}",
]


def overrides_for(root: Path) -> list[str]:
    return [*SMALL, f"run.store={root / 'store'}", f"run.scratch={root / 'scratch'}"]


def run_stages(project: Path, root: Path, *overrides: str) -> tuple[Store, Manifest, Path]:
    """(store, manifest, files) of an SFT stage that ran through its driver, and so did its data's."""
    settings = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", [*overrides_for(root), *overrides])
    store, made = Store(settings.run.store), {}
    for planned in plan_pipeline(settings):
        if planned.node not in ("data-sft", "sft"):
            continue
        spec = {
            "stage": planned.stage.name,
            "node": planned.node,
            "settings": planned.settings.model_dump(mode="json"),
            "key": planned.key.key,
            "key_source": planned.key.source,
            "inputs": {name: made[node].model_dump(mode="json") for name, node in planned.inputs.items()},
            "run": settings.run.model_dump(mode="json"),
        }
        path = root / f"{planned.node}.json"
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", planned.stage.module, "--spec", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=dict(os.environ))
        assert done.returncode == 0, done.stderr[-3000:]
        manifest = read_manifest(store, planned.stage.name, planned.key.key)
        assert manifest is not None
        made[planned.node] = manifest
    return store, made["sft"], fetch(store, made["sft"], root / "sft")


@pytest.fixture(scope="module")
def sft(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest, Path]:
    return run_stages(project, tmp_path_factory.mktemp("exports"))


def records(files: Path, phase: str) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["phase"] == phase}


def test_the_best_evaluation_is_exported(sft: Any) -> None:
    _, manifest, files = sft
    evaluations = records(files, "eval")
    assert list(evaluations) == [2, 4, 6]
    assert max(evaluations, key=lambda step: evaluations[step]["loss"]) == 2
    assert manifest.metrics["exported_step"] == 2
    assert manifest.metrics["eval/loss"] == evaluations[2]["loss"]


def test_what_is_exported_has_the_loss_that_was_measured(sft: Any) -> None:
    """Hugging Face's model and labels on the held-out rows: the recorded loss of step 2, not that of step 6."""
    _, manifest, files = sft
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    data = json.loads((files / "data_report.json").read_text())
    assert data["eval"]["items"] == 10
    table = tables(sft)["eval"]
    total = count = 0.0
    with torch.no_grad():
        for number in range(len(table)):
            sample = table.item(number).samples[0]
            labels = torch.tensor(sample.ids).long().masked_fill(torch.tensor(sample.weights) == 0, -100)
            trained = int((labels >= 0).sum())
            total += model(input_ids=torch.tensor(sample.ids)[None].long(), labels=labels[None]).loss.item() * trained
            count += trained
    assert total / count == pytest.approx(manifest.metrics["eval/loss"], rel=1e-4)


def tables(sft: Any) -> Any:
    from rlhf_core.data.token_cache import TokenTable

    store, _, _ = sft
    found = sorted(Path(store.url).glob("cache/tokens/*/*/tokens.arrow"))
    by_rows = {len(table): table for table in map(TokenTable, found)}
    return {"train": by_rows[64], "eval": by_rows[10]}


def test_training_checkpoints_are_rotated_by_age_and_by_metric_and_hold_an_export(sft: Any) -> None:
    """Saved at 2 (an evaluation better than any before), 3 and 6: the newest one and the best one are left."""
    store, manifest, files = sft
    steps = sorted(name for name in store.list_names(f"training/sft/{manifest.key}") if name.startswith("step-"))
    assert steps == ["step-000002", "step-000006"]
    own = load_file(files / "model" / "model.safetensors")
    for step, same in zip(steps, (True, False), strict=True):
        export = Path(store.url) / "training" / "sft" / manifest.key / step / "hf"
        AutoModelForCausalLM.from_pretrained(export)
        weights = load_file(export / "model.safetensors")
        assert weights.keys() == own.keys()
        assert all(torch.equal(weights[name], own[name]) for name in own) == same


def test_another_number_of_ranks_goes_on_with_the_same_data(sft: Any, project: Path, tmp_path: Path) -> None:
    """The checkpoint of step 2 is all that is left of the run of two ranks; one rank takes it to the end.

    Ranks are no part of the key. Losses agree but for the order of summation, so each step saw the same rows.
    """
    store, manifest, files = sft
    shutil.copytree(store.url, tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "artifacts" / "sft")
    shutil.rmtree(tmp_path / "store" / "training" / "sft" / manifest.key / "step-000006")
    _, again, after = run_stages(project, tmp_path, "sft.trainer.ranks=1")
    assert again.key == manifest.key
    two, one = records(files, "train"), records(after, "train")
    assert list(one) == [1, 2, 3, 4, 5, 6]
    assert one[1] == two[1]
    assert one[2] == two[2]
    for step in range(3, 7):
        assert one[step]["loss"] == pytest.approx(two[step]["loss"], rel=1e-4)
        assert one[step]["lr"] == two[step]["lr"]
    assert one[6] != two[6]
