"""Packed samples do not see one another: what flash attention is given, and models that do not isolate them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from rlhf_core.config.base import SettingsError
from rlhf_core.models.isolation import FLASH, check_isolation
from rlhf_core.models.policy import Policy
from rlhf_core.models.scorer import Scorer

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 16}
ISOLATE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4},
    "qwen3_moe": MOE,
}
LEAK: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    },
    "qwen3_next": {
        **MOE,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def model_of(model_type: str, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """With weights so large that what a layer sees shows in its outputs."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON, **{**ISOLATE, **LEAK}[model_type], **options)
    config._attn_implementation = "sdpa"
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


@torch.no_grad()
def check(model: Any, model_type: str, dtype: torch.dtype) -> None:
    check_isolation(model.to(dtype), model.lm.config, float32=dtype == torch.float32)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("model_type", ISOLATE)
def test_models_that_isolate_packed_samples_pass(model_type: str, dtype: torch.dtype) -> None:
    check(Policy(model_of(model_type)), model_type, dtype)


@DTYPES
@pytest.mark.parametrize("model_type", LEAK)
def test_models_that_do_not_are_refused(model_type: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        SettingsError, match=rf"^trainer.packing true: models of type {model_type} do not keep .*false$"
    ):
        check(Policy(model_of(model_type)), model_type, dtype)


def test_reward_models_are_judged_by_their_scores() -> None:
    def scorer(model_type: str) -> Scorer:
        return Scorer(model_of(model_type, AutoModelForSequenceClassification, num_labels=1))

    check(scorer("llama"), "llama", torch.float32)
    with pytest.raises(SettingsError, match="models of type opt"):
        check(scorer("opt"), "opt", torch.float32)


@torch.no_grad()
def test_positions_that_do_not_restart_are_refused() -> None:
    """Attention isolates the samples, but the second has positions as if it went on."""
    policy = Policy(model_of("gpt2"))

    def infer(input_ids: Tensor, position_ids: Tensor) -> Any:
        return policy(
            input_ids, position_ids=position_ids + 8 * (position_ids.diff(prepend=position_ids[:, :1]) < 0).cumsum(1)
        )

    with pytest.raises(SettingsError, match="models of type gpt2"):
        check_isolation(infer, policy.lm.config, float32=True)


def test_equal_rows_that_differ_by_rounding_do_not_condemn_a_model() -> None:
    """As with kernels that add in any order."""
    generator = torch.Generator().manual_seed(0)

    def infer(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        exact = -((input_ids + position_ids) % 7).float()
        return exact + 0.02 * torch.randn(exact.shape, generator=generator)

    check_isolation(infer, model_of("llama").config, float32=False)


# -- flash attention --------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 0]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 0]])  # the last of the second row is fill
SAMPLES = [(0, 0, 3), (0, 3, 7), (1, 0, 2), (1, 2, 6)]  # row, start, end


def seen_by_the_backbone(policy: Policy) -> list[Tensor]:
    seen: list[Tensor] = []
    backbone = getattr(policy.lm, policy.lm.base_model_prefix)
    backbone.register_forward_pre_hook(lambda _, __, given: seen.append(given["position_ids"]), with_kwargs=True)
    return seen


def as_flash(policy: Policy) -> Policy:
    """Its configuration says flash attention, while its layers attend by sdpa: there is no kernel here."""
    policy.lm.config = copy.deepcopy(policy.lm.config)
    policy.lm.config._attn_implementation = FLASH
    return policy


@torch.no_grad()
def test_flash_attention_gets_packed_rows_end_to_end() -> None:
    policy = as_flash(Policy(model_of("llama")))
    seen = seen_by_the_backbone(policy)
    together = policy(ROWS, position_ids=PACKED)
    assert seen[0].tolist() == [PACKED.flatten().tolist()]
    assert _is_packed_sequence(seen[0], len(seen[0]))
    assert not _is_packed_sequence(PACKED, len(PACKED))
    for row, start, end in SAMPLES:
        alone = policy(ROWS[row : row + 1, start:end])
        torch.testing.assert_close(together[row, start:end], alone[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_load_of_experts_is_that_of_the_rows_as_they_were() -> None:
    mask = torch.ones_like(ROWS)
    mask[1, -1] = 0
    logprobs, aux = Policy(model_of("qwen3_moe"))(ROWS, position_ids=PACKED, aux_mask=mask)
    flat, same = as_flash(Policy(model_of("qwen3_moe")))(ROWS, position_ids=PACKED, aux_mask=mask)
    torch.testing.assert_close(flat, logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(same, aux)


@torch.no_grad()
def test_padded_rows_stay_rows() -> None:
    policy = as_flash(Policy(model_of("llama")))
    seen = seen_by_the_backbone(policy)
    policy(ROWS, position_ids=torch.arange(7).expand(2, 7))
    policy(ROWS, torch.ones_like(ROWS))
    assert [None if s is None else s.shape for s in seen] == [(2, 7), None]
