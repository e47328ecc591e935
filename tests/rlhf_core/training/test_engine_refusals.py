"""Engines refuse what would give tokens another context than the model does: packing, sequence-parallel ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Lfm2Config, MistralConfig, OPTConfig

pytestmark = pytest.mark.engines

COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
HYBRID: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
PACKING = {"ranks": 2, "packing": True}


def saved(directory: Path, auto: Any, config: Any) -> str:
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("models") / "lfm2", AutoModelForCausalLM, Lfm2Config(**COMMON, **HYBRID))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hybrid_policy_is_refused(groups: Any, hybrid: str, exchanges: list[Any], dtype: str) -> None:
    given: dict[str, Any] = {"kind": "sft", "model": hybrid, "samples": exchanges, "dtype": dtype}
    with pytest.raises(Exception, match="packing true: models of type lfm2 do not keep the samples of a row apart"):
        groups[2].run("gradient", **given, trainer={**PACKING, "zero_stage": 3})
    groups[2].run("gradient", **given, trainer={**PACKING, "zero_stage": 3, "packing": False})


def test_a_reward_model_is_refused(groups: Any, tmp_path: Path, pairs: list[Any]) -> None:
    config = OPTConfig(**COMMON, ffn_dim=64, word_embed_proj_dim=32)
    config.num_labels = 1
    model = saved(tmp_path / "opt", AutoModelForSequenceClassification, config)
    with pytest.raises(Exception, match="packing true: models of type opt do not keep the samples of a row apart"):
        groups[2].run("gradient", kind="rm", model=model, samples=pairs, trainer={**PACKING, "zero_stage": 2})


def test_a_window_is_not_forgotten_on_sequence_parallel_ranks(
    groups: Any, tmp_path: Path, exchanges: list[Any]
) -> None:
    """Also of a model that the stage does not see, as DPO's reference. Of 8 samples the longest has 19 tokens, or 20
    for two ranks."""
    trainer = {"ranks": 2, "sequence_parallel": 2, "zero_stage": 2}

    def run(window: int) -> None:
        config = MistralConfig(**COMMON, intermediate_size=64, num_key_value_heads=2, sliding_window=window)
        model = saved(tmp_path / str(window), AutoModelForCausalLM, config)
        groups[2].run("gradient", kind="sft", model=model, samples=exchanges, trainer=trainer)

    run(20)
    with pytest.raises(Exception, match="has no sliding window, and the model's of 19 tokens is below the 20 of a row"):
        run(19)
