"""Dropout of a model's own configuration, which is off in RL."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_core.config.rl import PpoSettings
from rlhf_core.training.rl_models import RlModels

GPT2: dict[str, Any] = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"max_position_embeddings": 16, "attention_dropout": 0.1},
}
SETTINGS = {
    **{"optimizer": {"lr": 1e-5}, "critic": {"optimizer": {"lr": 1e-5}, "init": "policy"}, "reward": {"exact": 1.0}},
    **{"rollout": {"prompts": 1, "max_new_tokens": 4, "max_prompt_len": 4}, "steps": 1, "batch_size": 1},
    **{"dtype": "float32", "trainer": {"zero_stage": 2}},
}
IDS = torch.arange(3, 15)[None]


def models() -> list[PreTrainedModel]:
    torch.manual_seed(0)
    return [GPT2LMHeadModel(GPT2Config(**GPT2)), LlamaForCausalLM(LlamaConfig(**LLAMA))]


@pytest.mark.parametrize("lm", models(), ids=["gpt2", "llama"])
def test_policy_and_critic_compute_the_same_in_training(lm: PreTrainedModel, tmp_path: Path) -> None:
    """Dropout is 0.1 in both configurations, of GPT-2 by default."""
    lm.save_pretrained(tmp_path / "base")
    made = RlModels(PpoSettings.model_validate(SETTINGS), pad_token_id=0)
    critic = made._critic(tmp_path / "base")
    torch.nn.init.normal_(critic.head.weight)  # a head of zeros would hide all noise
    for model in (made._policy(tmp_path / "base"), critic):
        trained, judged = model.train()(IDS), model.eval()(IDS)
        assert torch.allclose(trained, judged, atol=1e-6)
        assert judged.abs().max() > 0.01


@pytest.mark.parametrize("lm", models(), ids=["gpt2", "llama"])
def test_the_exported_configuration_keeps_its_dropout(lm: PreTrainedModel, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path / "base")
    policy = RlModels(PpoSettings.model_validate(SETTINGS), pad_token_id=0)._policy(tmp_path / "base")
    policy.lm.save_pretrained(tmp_path / "out")
    base, out = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "out"))
    kept = {name for name in base if "drop" in name}
    assert kept
    assert {name: out[name] for name in kept} == {name: base[name] for name in kept}
