"""PPO's trainer as the stage has it: where its critic starts, when its policy is trained, its attention kernel."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_core.config.rl import CriticSettings, PpoSettings, RewardSettings, RolloutSettings
from rlhf_core.config.training import OptimizerSettings, TrainerSettings
from rlhf_core.store.artifacts import publish
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.training.rank import Job

pytestmark = pytest.mark.engines

UP = "model.layers.0.mlp.up_proj.weight"


def published(store: Store, stage: str, model: str, directory: Path) -> Manifest:
    shutil.copytree(model, directory / "model")
    source = {"stage": stage}
    fields = {"stage": stage, "key": sha256_text(canonical_json(source)), "key_source": source}
    return publish(store, local_dir=directory, manifest_fields=fields, lease=None)


@pytest.mark.parametrize(("init", "attention"), [("rm", "eager"), ("policy", "sdpa")])
def test_trainer_follows_its_settings(
    groups: Any, llama: str, scorer: str, trajectories: Any, tmp_path: Path, init: Any, attention: Any
) -> None:
    """Critic's start, a warm-up of one step, attention. The policy's weights are others than the reward model's."""
    policy = Path(shutil.copytree(llama, tmp_path / "policy"))
    weights = load_file(policy / "model.safetensors")
    save_file({**weights, UP: 0.9 * weights[UP]}, policy / "model.safetensors", metadata={"format": "pt"})
    store = Store(str(tmp_path / "store"))
    manifests = {
        "policy": published(store, "sft", str(policy), tmp_path / "sft"),
        "reward": published(store, "rm", scorer, tmp_path / "rm"),
    }
    settings = PpoSettings(
        optimizer=OptimizerSettings(lr=1e-2),
        critic=CriticSettings(optimizer=OptimizerSettings(lr=1e-2), init=init, warmup_steps=1),
        rollout=RolloutSettings(prompts=8, max_new_tokens=16, max_prompt_len=16),
        reward=RewardSettings(rm=1.0),
        steps=3,
        batch_size=8,
        dtype="float32",
        trainer=TrainerSettings(zero_stage=2, micro_batch_size=4, attention=attention),
    )
    job = Job("ppo", "a" * 64, settings, store.url, 1, str(tmp_path), manifests)
    done = groups[1].run("ppo", job=job, samples=trajectories, steps=2)[0]

    source = Path(scorer) if init == "rm" else policy
    assert np.array_equal(done["critic"][UP], load_file(source / "model.safetensors")[UP])
    assert not done["critic"]["score.weight"].any()  # values start at 0
    (policy_0, critic_0), (policy_1, critic_1), (policy_2, critic_2) = done["digests"]
    assert policy_0 == policy_1 != policy_2
    assert len({critic_0, critic_1, critic_2}) == 3
    assert not any(metric.startswith("policy/") for metric in done["metrics"][0])
    assert {"policy/loss", "policy/clipped", "critic/loss"} <= done["metrics"][1].keys()
    assert done["attention"] == [attention] * 4
