"""GRPO with dynamic sampling and an adapted KL is killed after a step, run again, and ends in the bits of a run that
nobody disturbed. PPO's own such test goes through Prefect (tests/flows/test_chain.py)."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.base import parse_settings
from rlhf_core.config.pipeline import PipelineSettings
from stages.plan import plan_pipeline
from stages.runner import run_stage

sys.path.insert(0, str(Path(__file__).parent))
from kill_trials import LEASE_TTL_S, EventLog, StageRun, _spec, write_demo_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

STEPS, KILLED_AFTER = 5, 3
GRPO = {
    "optimizer": {"lr": 1e-3},
    "rollout": {"prompts": 4, "samples_per_prompt": 3, "max_new_tokens": 8, "max_prompt_len": 24},
    # A policy that has learned little differs in the length of what it writes.
    "reward": {"exact": 1.0, "length": {"high": 6, "weight": 0.5}},
    "algorithm": {
        "preset": "grpo",
        "kl": {"target": 0.05, "horizon": 50, "refresh_steps": 2},
        "shaping": {"normalise": True},
        "dynamic_sampling": {"enabled": True, "max_rounds": 2},
        "mismatch": {"level": "token", "mode": "clip", "low": 0.0, "high": 2.0},
        "entropy_coef": 0.001,
    },
    "steps": STEPS,
    "batch_size": 6,
    "epochs": 2,
    "ema_decay": 0.7,
    "eval_steps": 2,
    "evaluation": {"samples_per_prompt": 2},
    "best_metric": "mean@2",
    "dtype": "float32",
    "sampler": {"dtype": "float32", "max_model_len": 64},
    "trainer": {"ranks": 2, "zero_stage": 2, "micro_batch_size": 3, "packing": True, "save_steps": 2},
}


def settings_of(directory: Path, model: Path) -> PipelineSettings:
    run = {"store": f"{directory}/store", "scratch": f"{directory}/scratch", "lease_ttl_s": LEASE_TTL_S}
    data = {name: {"arithmetic": {"rows": 24}} for name in ("sft", "prompts")} | {"eval": {"arithmetic": {"rows": 6}}}
    sft = {"model": {"path": str(model)}, "optimizer": {"lr": 1e-3}, "batch_size": 8, "max_len": 48, "max_steps": 2}
    sft |= {"dtype": "float32", "trainer": {"ranks": 1, "save_steps": None}}
    return parse_settings(PipelineSettings, {"run": run, "data": data, "sft": sft, "ppo": GRPO})


def made_inputs(directory: Path, model: Path) -> dict[str, Any]:
    """Data and policy in a store below `directory`; their manifests by node."""
    settings, made = settings_of(directory, model), {}
    for planned in plan_pipeline(settings)[:-1]:
        scratch = directory / planned.node
        spec = _spec(planned, settings, {name: made[node] for name, node in planned.inputs.items()}, scratch)
        made[planned.node] = run_stage(planned.stage, spec, scratch, EventLog(scratch / "events.jsonl"))
    return made


def run_of(directory: Path, inputs: Path, made: dict[str, Any], model: Path) -> StageRun:
    """The RL stage in a store of its own, which holds its inputs."""
    shutil.copytree(inputs / "store", directory / "store")
    settings = settings_of(directory, model)
    planned = plan_pipeline(settings)[-1]
    own = {name: made[node] for name, node in planned.inputs.items()}
    spec = _spec(planned, settings, own, directory / "attempt")
    (directory / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    return StageRun(directory, planned, spec)


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if not name.startswith("seconds/")} for one in records]


def test_a_killed_grpo_run_ends_in_the_bits_of_one_that_was_not_killed(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    made = made_inputs(tmp_path / "inputs", model)
    killed = run_of(tmp_path / "killed", tmp_path / "inputs", made, model)
    newest = killed.run_and_kill(KILLED_AFTER)
    assert newest == 2
    straight = run_of(tmp_path / "straight", tmp_path / "inputs", made, model)
    undisturbed = straight.run()

    killed.wait_for_lease()
    resumed = killed.run()
    assert killed.resumed_at() == [newest]
    assert resumed.key == undisturbed.key
    assert resumed.content_digest == undisturbed.content_digest
    metrics = straight.metrics(undisturbed)
    assert without_times(killed.metrics(resumed)) == without_times(metrics)

    steps = [record for record in metrics if record["phase"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert any(record["dynamic_sampling/rounds"] == 2 for record in steps)
    assert len({record["kl/coef"] for record in steps}) > 1
    evaluations = {record["step"]: record["mean@2"] for record in metrics if record["phase"] == "eval"}
    assert sorted(evaluations) == [0, 2, 4, 5]
    best = max((2, 4, 5), key=lambda step: (evaluations[step], -step))
    assert undisturbed.metrics["exported_step"] == best
