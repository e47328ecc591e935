"""The stage sft that stands before an imported ppo hands OpenRLHF's model on, bit by bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flows.openrlhf.importing import import_command
from flows.openrlhf.shell import from_script
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.store import Store
from stages.plan import PlannedStage, plan_pipeline

SCRIPT = """
openrlhf.cli.train_ppo_ray --pretrain {root}/model --prompt_data {root}/prompts.jsonl --input_key prompt \\
  --label_key label --remote_rm_url http://127.0.0.1:9/get_reward --prompt_max_len 40 --generate_max_len 24 \\
  --actor_num_gpus_per_node 1 --input_template "{{}}="
"""


@pytest.mark.engines
def test_the_weights_do_not_move(tmp_path: Path):
    write_scratch_model(
        tmp_path / "model", hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, max_position=64, seed=3
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2=", "label": "3"}\n' * 8)
    (tmp_path / "pipeline.yaml").write_text(import_command(from_script(SCRIPT.format(root=tmp_path)), 8).yaml())
    settings = load_pipeline(
        tmp_path / "pipeline.yaml", [f"run.store={tmp_path}/store", f"run.scratch={tmp_path}/scratch"]
    )
    store = Store(settings.run.store)
    made: dict[str, dict[str, Any]] = {}
    for planned in plan_pipeline(settings):
        if planned.node in ("data-sft", "sft"):
            made[planned.node] = run(planned, settings.run.model_dump(mode="json"), made, store, tmp_path)
    manifest = read_manifest(store, "sft", made["sft"]["key"])
    assert manifest is not None
    assert manifest.model is not None
    assert manifest.model["input_template"] == "{}="  # through which ppo reads its prompts
    exported = load_file(fetch(store, manifest, tmp_path / "out") / "model" / "model.safetensors")
    given = load_file(tmp_path / "model" / "model.safetensors")
    assert set(exported) == set(given)
    for name, weights in given.items():
        assert torch.equal(exported[name], weights.to(torch.bfloat16)), name


def run(
    planned: PlannedStage, run_settings: dict[str, Any], made: dict[str, dict[str, Any]], store: Store, folder: Path
) -> dict[str, Any]:
    """The manifest of a stage that was run alone."""
    spec = {
        "stage": planned.stage.name,
        "node": planned.node,
        "settings": planned.settings.model_dump(mode="json"),
        "key": planned.key.key,
        "key_source": planned.key.source,
        "inputs": {name: made[source] for name, source in planned.inputs.items()},
        "run": run_settings,
    }
    file = folder / f"{planned.node}.json"
    file.write_text(json.dumps(spec))
    command = [sys.executable, "-m", planned.stage.module, "--spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = read_manifest(store, planned.stage.name, planned.key.key)
    assert manifest is not None
    return manifest.model_dump(mode="json")
