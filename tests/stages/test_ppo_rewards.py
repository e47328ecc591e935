"""PPO by its driver on a reward function that fails now and then: groups are dropped, and failures counted. And again
from its rollouts, without a sampler."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from logged_metrics import check_logged, without_times

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.store import Store
from stages.plan import PlannedStage, plan_pipeline

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

FUNCTION = """
def reward_func(queries, prompts, labels):
    assert queries[0].startswith("<s><|user|>" + prompts[0] + "<|end|><|assistant|>"), queries
    if int(labels[0]) % 3 == 0:
        raise RuntimeError("no multiples of three")
    return {"rewards": [0.5], "scores": [1.0], "extra_logs": {"label": float(labels[0])}}
"""
SCRATCH = "{hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64, max_position: 64}"


def overrides(folder: Path) -> list[str]:
    return [
        "rm=null",
        "evaluate=null",
        "data.sft.arithmetic={rows: 64, eval_rows: 8}",
        "data.prompts.arithmetic={rows: 16}",
        "data.eval.arithmetic={rows: 8}",
        f"sft.model={{scratch: {SCRATCH}}}",
        "sft.max_steps=2",
        "sft.trainer={ranks: 1, micro_batch_size: 64}",
        "sft.eval_steps=null",
        f"ppo.reward={{math: 1.0, functions: [{{path: {folder}/reward.py, name: mine}}], sandbox: {{workers: 1}}}}",
        "ppo.rollout={prompts: 8, samples_per_prompt: 2, max_new_tokens: 16, max_prompt_len: 24}",
        "ppo.batch_size=16",
        "ppo.steps=2",
        "ppo.critic={optimizer: {lr: 1.0e-3}, lora: {rank: 4}}",
        "ppo.optimizer.lr=5.0e-3",
        "ppo.lora={rank: 4}",
        "ppo.ptx={coef: 0.5, batch_size: 8, max_len: 48}",
        "ppo.dump_rollouts=true",
        "ppo.evaluation={samples_per_prompt: 2, shown_prompts: 3}",
        "ppo.trainer={ranks: 1, micro_batch_size: 8, save_steps: 2}",
        f"run.store={folder}/store",
        f"run.scratch={folder}/scratch",
    ]


def run(planned: PlannedStage, plan: dict[str, PlannedStage], store: Store, settings: Any, folder: Path) -> Any:
    """The driver, and what it left behind: nothing."""
    inputs = {}
    for name, source in planned.inputs.items():
        manifest = read_manifest(store, plan[source].stage.name, plan[source].key.key)
        assert manifest is not None
        inputs[name] = manifest.model_dump(mode="json")
    spec = {
        "stage": planned.stage.name,
        "node": planned.node,
        "settings": planned.settings.model_dump(mode="json"),
        "key": planned.key.key,
        "key_source": planned.key.source,
        "inputs": inputs,
        "run": settings.run.model_dump(mode="json"),
        "scratch": f"{folder}/scratch/{planned.node}",
    }
    path = folder / f"{planned.node}.json"
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", planned.stage.module, "--spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert not list((folder / "scratch" / planned.node).glob("sandbox-*"))
    return done


def replay(key: str, folder: Path, out: str, *options: str) -> Any:
    command = [sys.executable, "-c", "from flows.cli import app; app()", "replay", key[:16]]
    command += ["--store", f"{folder}/store", "--out", f"{folder}/{out}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_failed_rewards_drop_their_groups_and_are_counted(project: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FUNCTION)
    settings = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", overrides(tmp_path))
    store = Store(settings.run.store)
    plan = {one.node: one for one in plan_pipeline(settings)}
    for node in ("data-sft", "data-prompts", "data-eval", "sft"):
        done = run(plan[node], plan, store, settings, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]

    (tmp_path / "reward.py").write_text(f"{FUNCTION}# another content than planned")
    refused = run(plan["ppo"], plan, store, settings, tmp_path)
    assert refused.returncode == 2
    assert "error: ppo.reward.functions.mine is not what this run was planned with" in refused.stderr

    (tmp_path / "reward.py").write_text(FUNCTION)
    done = run(plan["ppo"], plan, store, settings, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = read_manifest(store, "ppo", plan["ppo"].key.key)
    assert manifest is not None
    files = fetch(store, manifest, tmp_path / "out")
    lines = (files / "metrics.jsonl").read_text().splitlines()
    check_logged(settings.ppo, map(json.loads, lines))
    trained = [one for one in map(json.loads, lines) if one["phase"] == "train"]
    assert len(trained) == 2
    # The sampler has the merged weights of the adapters, which the first step has moved.
    assert all(one["parity/max"] < 1e-3 for one in trained)
    assert trained[0]["kl"] == 0 != trained[1]["kl"]
    assert all(one["policy/ptx_loss"] > 0 for one in trained)
    assert manifest.metrics["ptx_rows"] == 64
    assert manifest.model is not None
    assert (manifest.model["lora"]["rank"], manifest.model["lora"]["alpha"]) == (4, 16.0)
    assert json.loads((files / "model" / "adapter" / "base.json").read_text())["path"] == f"sft/{plan['sft'].key.key}"
    # Both responses of a group fail together; the label of no group that is left is a multiple of three.
    dropped = sum(one["reward/dropped_groups"] for one in trained)
    assert 0 < dropped < 16
    assert sum(one.get("reward/mine/failed/error", 0.0) for one in trained) == 2 * dropped
    assert all(one["reward/mine"] == 0.5 for one in trained)
    assert {"reward/math", "reward/math/unparsable", "reward/mine/label"} <= trained[0].keys()

    generations = [json.loads(line) for line in (files / "generations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in generations] == [0] * 3 + [2] * 3
    assert [row["prompt"] for row in generations[:3]] == [row["prompt"] for row in generations[3:]]
    assert (files / "plots" / "reward_percentiles.png").stat().st_size

    again = replay(manifest.key, tmp_path, "again")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "trained on 2 rollouts, the same as the run's to the bit" in again.stdout
    replayed = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [without_times(one) for one in replayed] == [without_times(one) for one in trained]
    other = replay(manifest.key, tmp_path, "other", "--set", "ppo.algorithm.kl.coef=1.0", "--steps", "1")
    assert other.returncode == 0, other.stderr[-3000:]
    assert "trained on 1 rollouts, another than the run's" in other.stdout
