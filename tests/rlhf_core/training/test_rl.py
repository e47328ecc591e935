"""PPO's trainer as the stage has it: where its critic starts, when its policy is trained, its attention kernel, what a
process reward model gives.
"""

import math
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.rl import CriticSettings, PpoSettings, RewardSettings, RolloutSettings
from rlhf_core.config.training import OptimizerSettings, TrainerSettings
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.store.store import Store
from rlhf_core.training.rank import Job

sys.path.insert(0, str(Path(__file__).parent))
from rl_jobs import OPTIMIZER, PLACEHOLDER, PTX, RIGHT, UP, WRONG, process_model, published, rollout, rollout_job

pytestmark = pytest.mark.engines


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
    done = groups[1].run("rl_programs:ppo", job=job, samples=trajectories, steps=2)[0]

    source = Path(scorer) if init == "rm" else policy
    assert np.array_equal(done["critic"][UP], load_file(source / "model.safetensors")[UP])
    assert not done["critic"]["score.weight"].any()  # values start at 0
    (policy_0, critic_0), (policy_1, critic_1), (policy_2, critic_2) = done["digests"]
    assert policy_0 == policy_1 != policy_2
    assert len({critic_0, critic_1, critic_2}) == 3
    assert not any(metric.startswith("policy/") for metric in done["metrics"][0])
    assert {"policy/loss", "policy/clipped", "critic/loss"} <= done["metrics"][1].keys()
    assert done["attention"] == [attention] * 4


COMMA, END = 18, 2


def sampled(prompt: list[int], response: list[int]) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array(prompt),
        response_ids=np.array(response, dtype=np.int64),
        action_mask=np.ones(len(response), dtype=bool),
        sampler_logprobs=np.zeros(len(response), dtype=np.float32),
        version_spans=(VersionSpan(0, 0, len(response)),),
        group_id=0,
        prompt_id=0,
        sample_id=0,
        finish_reason="stop",
    )


def test_a_process_reward_model_judges_each_step_of_a_response(groups: Any, llama: str, tmp_path: Path) -> None:
    """Against plain transformers on one response at a time, the placeholders set by hand. No reward model at all."""
    process = process_model(llama, tmp_path / "made")
    store = Store(str(tmp_path / "store"))
    manifests = {
        "policy": published(store, "sft", llama, tmp_path / "sft"),
        "process": published(store, "prm", process, tmp_path / "prm"),
    }
    settings = PpoSettings(
        optimizer=OptimizerSettings(lr=1e-2),
        critic=CriticSettings(optimizer=OptimizerSettings(lr=1e-2)),
        rollout=RolloutSettings(prompts=8, max_new_tokens=16, max_prompt_len=16),
        reward=RewardSettings(prm=1.0),
        steps=3,
        batch_size=8,
        dtype="float32",
        trainer=TrainerSettings(zero_stage=2, micro_batch_size=2),
    )
    prompt = [1, 4, 7, 16, 8, 2, 5]
    # (response, the same with placeholders): with steps, cut off, with a special token in a step, without a step.
    cases = [
        ([7, 16, COMMA, 9, END], [7, 16, PLACEHOLDER, COMMA, 9, PLACEHOLDER]),
        ([7, COMMA, COMMA, 8, 9, 10], [7, PLACEHOLDER, COMMA, COMMA, 8, 9, 10, PLACEHOLDER]),
        ([7, 30, COMMA, END], [7, 30, PLACEHOLDER]),
        ([END], []),
    ]
    job = Job("ppo", "b" * 64, settings, store.url, 1, str(tmp_path), manifests)
    trajectories = [sampled(prompt, response) for response, _ in cases]
    judged = groups[1].run("rl_programs:judged", job=job, trajectories=trajectories)[0]

    model = AutoModelForCausalLM.from_pretrained(process)
    for found, (response, placed) in zip(judged, cases, strict=True):
        logits = model(torch.tensor([prompt + placed])).logits[0, len(prompt) :, [RIGHT, WRONG]].double()
        expected = torch.softmax(logits, dim=-1)[torch.tensor(placed, dtype=torch.long) == PLACEHOLDER, 0]
        assert found.step_scores.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert math.isnan(found.reward_score)
        # A step's end is the token that stands before its placeholder.
        before = [placed[at - 1] for at, token in enumerate(placed) if token == PLACEHOLDER]
        assert [response[end] for end in found.step_ends] == before
        assert all(end < later for end, later in pairwise(found.step_ends))


KL = {"coef": 0.1, "estimator": "k3", "place": "loss", "target": 0.01, "horizon": 20, "refresh_steps": 2}
LORA = {"rank": 2, "alpha": 8.0}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"critic": {"optimizer": {"lr": 1e-2}}, "algorithm": {"kl": {"target": 0.01, "horizon": 20}}},
    "grpo": {
        "ema_decay": 0.9,
        "algorithm": {"preset": "grpo", "kl": KL, "shaping": {"normalise": True}, "entropy_coef": 0.01},
    },
    "adapters": {
        "lora": LORA,
        "ptx": PTX,
        "critic": {"optimizer": OPTIMIZER, "lora": LORA},
        "ema_decay": 0.9,
        "algorithm": {"kl": {"target": 0.01, "horizon": 20}},
    },
}


@pytest.mark.parametrize(("ranks", "zero_stage", "packing"), [(1, 2, False), (2, 3, True)])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_to_the_same_bits_with_all_of_its_state(
    groups: Any,
    llama: str,
    trajectories: Any,
    tmp_path: Path,
    name: str,
    ranks: int,
    zero_stage: int,
    packing: bool,
) -> None:
    """Broken after 3 rollouts of 5. Of 7 trajectories in steps of 4 the last has 3, over two ranks."""
    trainer = {"ranks": ranks, "zero_stage": zero_stage, "packing": packing, "save_hf": name == "adapters"}
    job = rollout_job(tmp_path / "run", {"policy": llama}, trainer, optimizer={"lr": 1e-2}, epochs=2, **RUNS[name])
    given = {"job": job, "trajectories": rollout(trajectories), "directory": str(tmp_path / "checkpoint")}
    found = groups[ranks].run("rl_programs:resumed", before=3, after=2, **given)
    refreshed, adapted = name == "grpo", name == "adapters"
    for one in found:
        assert one["resumed"] == one["whole"]
        assert one["whole"] == found[0]["whole"]
        assert one["whole"]["policy"] != one["start"]["policy"]
        state = one["whole"]["state"]
        assert state.kl_coef != one["start"]["state"].kl_coef
        assert state.rewards.count == 35
        assert state.reference_step == (4 if refreshed else 0)
        # With adapters the policy without them is the reference: no second model.
        assert ("reference" in one["whole"]) == (not adapted)
        assert adapted or (one["whole"]["reference"] != one["start"]["reference"]) == refreshed
        assert ("critic" in one["whole"]) == (name != "grpo")
        assert state.ptx_position == (5 * 2 * 2 * 3 if adapted else 0)  # rollouts, epochs, steps of each, rows
        # What is exported, and sent for an evaluation, is the average where there is one.
        assert (one["whole"]["averaged"] != one["whole"]["policy"]) == (name != "ppo")
        assert {"hf/model.safetensors", "hf/adapter/adapter_model.safetensors"} & set(one["files"]) == (
            {"hf/model.safetensors", "hf/adapter/adapter_model.safetensors"} if adapted else set()
        )


@pytest.mark.parametrize("packing", [False, True])
def test_scores_are_those_of_plain_transformers(
    groups: Any, llama: str, scorer: str, trajectories: Any, tmp_path: Path, packing: bool
) -> None:
    """Log-probs, entropies and the reward model's score, one trajectory at a time and without padding."""
    store = Store(str(tmp_path / "store"))
    settings = PpoSettings.model_validate(
        {
            "optimizer": {"lr": 1e-2},
            "critic": {"optimizer": {"lr": 1e-2}},
            "rollout": {"prompts": 7, "max_new_tokens": 16, "max_prompt_len": 16, "temperature": 0.7},
            "reward": {"rm": 1.0},
            "steps": 1,
            "batch_size": 7,
            "dtype": "float32",
            "sampler": {"max_model_len": 64},
            "trainer": {"ranks": 1, "micro_batch_size": 2, "packing": packing},
        }
    )
    manifests = {
        "policy": published(store, "sft", llama, tmp_path / "sft"),
        "reward": published(store, "rm", scorer, tmp_path / "rm"),
    }
    job = Job("ppo", "d" * 64, settings, store.url, 1, str(tmp_path), manifests)
    given = rollout(trajectories)
    scored, judged = groups[1].run("rl_programs:scored", job=job, trajectories=given)[0]
    policy = AutoModelForCausalLM.from_pretrained(llama)
    reward = AutoModelForSequenceClassification.from_pretrained(scorer)
    for one, judgement, t in zip(scored, judged, given, strict=True):
        ids = torch.tensor([*t.prompt_ids, *t.response_ids])
        start = len(t.prompt_ids)
        logprobs = torch.log_softmax(policy(ids[None]).logits[0].double() / 0.7, dim=-1)[start - 1 : -1]
        taken = logprobs.gather(-1, ids[start:, None])[:, 0]
        for found in (one.logprobs, one.ref_logprobs):
            assert found.tolist() == pytest.approx(taken.tolist(), abs=1e-4)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        assert one.entropy.tolist() == pytest.approx(entropy.tolist(), abs=1e-4)
        assert judgement.reward_score == pytest.approx(reward(ids[None]).logits[0, 0].item(), abs=1e-4)
        assert one.values.tolist() == [0.0] * len(t.response_ids)
