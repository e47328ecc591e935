"""A stage that starts from a model of the hub: planned, then trained, from a hub on the loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub

from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.store import Store

POLICY, MOVED, REFERENCE = "aaaa" * 10, "bbbb" * 10, "cccc" * 10
SIZES = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 32, "max_position": 64}
PIPELINE = """
data: {{pairs: {{arithmetic: {{rows: 16, eval_rows: 4}}}}}}
run: {{store: {root}/store, scratch: {root}/scratch}}
dpo:
  model: {model}
  reference: {{hub: org/reference}}
  optimizer: {{lr: 1.0e-3}}
  batch_size: 8
  max_len: 48
  max_steps: 1
  dtype: float32
  trainer: {{ranks: 1, micro_batch_size: 8}}
"""
PLAN = """
import json, sys
from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import load_pipeline
from stages.plan import plan_pipeline
settings = load_pipeline(sys.argv[1])
try:
    plan = plan_pipeline(settings)
except SettingsError as error:
    sys.exit(str(error))
print(json.dumps([
    {"stage": p.stage.name, "node": p.node, "settings": p.settings.model_dump(mode="json"), "key": p.key.key,
     "key_source": p.key.source, "inputs": dict(p.inputs), "run": settings.run.model_dump(mode="json"),
     "module": p.stage.module}
    for p in plan
]))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, str]]:
    """(hub, address) with the models org/policy and org/reference."""
    files = []
    for seed in (0, 1):
        directory = tmp_path_factory.mktemp("model")
        write_scratch_model(directory, **SIZES, seed=seed)
        files.append({path.name: path.read_bytes() for path in directory.iterdir()})
    repositories = {"org/policy": files[0], f"org/reference@{REFERENCE}": files[1], "org/gated": files[0]}
    hub = Hub(repositories, {"main": REFERENCE, "v1": POLICY}, gated=frozenset({"org/gated"}))
    with hub.served() as address:
        yield hub, address


def python(hub: tuple[Hub, str], root: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    given = {"HF_ENDPOINT": hub[1], "HF_HOME": str(root / "hub"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment = os.environ | given | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def plan(hub: tuple[Hub, str], root: Path, model: str) -> "subprocess.CompletedProcess[str]":
    path = root / "pipeline.yaml"
    path.write_text(PIPELINE.format(root=root, model=model))
    return python(hub, root, "-c", PLAN, str(path))


def planned(hub: tuple[Hub, str], root: Path, model: str) -> dict[str, Any]:
    done = plan(hub, root, model)
    assert done.returncode == 0, done.stderr
    return {node["node"]: node for node in json.loads(done.stdout)}


def test_the_key_holds_the_commit_and_the_settings_are_pinned_to_it(hub: tuple[Hub, str], tmp_path: Path) -> None:
    """A run reads what it was planned with, wherever the branch moves meanwhile."""
    branch = planned(hub, tmp_path, "{hub: org/policy, revision: v1}")["dpo"]
    assert branch["settings"]["model"]["revision"] == POLICY
    assert branch["settings"]["reference"]["revision"] == REFERENCE
    assert branch["key_source"]["inputs"]["model"] == POLICY
    assert branch["key_source"]["inputs"]["reference"] == REFERENCE
    assert planned(hub, tmp_path, f"{{hub: org/policy, revision: {POLICY}}}")["dpo"]["key"] == branch["key"]
    assert planned(hub, tmp_path, f"{{hub: org/policy, revision: {MOVED}}}")["dpo"]["key"] != branch["key"]


def test_a_model_that_the_hub_does_not_know_is_refused_before_anything_starts(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    done = plan(hub, tmp_path, "{hub: org/absent}")
    assert done.returncode == 1
    assert done.stderr.startswith("dpo.model.hub: model org/absent cannot be read: ")
    assert done.stderr.count("\n") == 1


def run_stage(hub: tuple[Hub, str], root: Path, node: dict[str, Any], made: dict[str, Any], **variables: str) -> Any:
    inputs = {name: made[source] for name, source in node["inputs"].items()}
    path = root / f"{node['node']}.json"
    path.write_text(json.dumps({**{k: v for k, v in node.items() if k != "module"}, "inputs": inputs}))
    return python(hub, root, "-m", node["module"], "--spec", str(path), **variables)


@pytest.mark.engines
def test_a_stage_trains_from_models_of_the_hub(hub: tuple[Hub, str], tmp_path: Path) -> None:
    plan = planned(hub, tmp_path, "{hub: org/policy, revision: v1}")
    gated = planned(hub, tmp_path, "{hub: org/gated, revision: v1}")
    store, made = Store(str(tmp_path / "store")), {}
    done = run_stage(hub, tmp_path, plan["data-pairs"], made)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = read_manifest(store, "prepare-data", plan["data-pairs"]["key"])
    assert manifest is not None
    made["data-pairs"] = manifest.model_dump(mode="json")

    refused = run_stage(hub, tmp_path, gated["dpo"], made)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: model org/gated of the hub cannot be read: ")

    done = run_stage(hub, tmp_path, plan["dpo"], made)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = read_manifest(store, "dpo", plan["dpo"]["key"])
    assert manifest is not None
    assert manifest.inputs["model"] == POLICY
    # Of two models of different seeds: with the reference equal to the policy the loss would start at log 2.
    assert abs(manifest.metrics["first_loss"] - 0.6931) > 1e-3
