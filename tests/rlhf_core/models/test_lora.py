"""Adapters in a model, their names, and whole weights; peft's own saving and merging are the reference."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf_core.config.base import SettingsError
from rlhf_core.config.supervised import RmSettings
from rlhf_core.config.training import LoraSettings, OptimizerSettings, TrainerSettings
from rlhf_core.models.lora import (
    adapter_state,
    adapters_off,
    add_lora,
    hugging_face_name,
    is_adapter,
    merged_state,
    nf4_config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def causal(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def reward() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()


def qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()  # its projections have biases


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()


def trained(lm: PreTrainedModel) -> None:
    """Adapters, and a head that is trained, far from where they started."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def named(lm: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in lm.named_parameters()]


IDS = torch.tensor([[5, 9, 30, 7, 1]])


def test_all_linear_layers_but_the_head_have_an_adapter_and_the_rest_is_frozen() -> None:
    lm = causal(tie_word_embeddings=False)
    before = lm(IDS).logits
    add_lora(lm, LoraSettings(rank=3, alpha=6), "causal", seed=0)
    torch.testing.assert_close(lm(IDS).logits, before, rtol=0, atol=0)
    learning = {name: tuple(p.shape) for name, p in lm.named_parameters() if p.requires_grad}
    assert {name.split(".")[4] for name in learning} == LAYERS
    assert len(learning) == 2 * 2 * len(LAYERS)
    assert learning["model.layers.1.mlp.down_proj.lora_A.default.weight"] == (3, 24)
    assert learning["model.layers.1.mlp.down_proj.lora_B.default.weight"] == (16, 3)
    assert not lm.lm_head.weight.requires_grad
    assert isinstance(lm, LlamaForCausalLM)


def test_a_reward_models_head_is_trained_whole_and_starts_as_it_was() -> None:
    lm = reward()
    head = lm.score.weight.detach().clone()
    add_lora(lm, LoraSettings(rank=2, target_modules=("q_proj",)), "reward", seed=0)
    learning = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    assert set(learning) == {
        *(f"model.layers.{i}.self_attn.q_proj.lora_{m}.default.weight" for i in range(2) for m in "AB"),
        "score.modules_to_save.default.weight",
    }
    assert torch.equal(learning["score.modules_to_save.default.weight"], head)
    assert torch.equal(lm.score.weight, head)


def test_the_first_matrices_depend_on_the_seed_alone() -> None:
    def first(seed: int, drawn_before: int) -> list[torch.Tensor]:
        lm = causal()
        torch.randn(drawn_before)
        state = torch.get_rng_state()
        add_lora(lm, LoraSettings(rank=2), "causal", seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [tensor for name, tensor in named(lm) if is_adapter(name)]

    assert all(map(torch.equal, first(4, 0), first(4, 7)))
    assert not all(map(torch.equal, first(4, 0), first(5, 0)))


@pytest.mark.parametrize("make", [causal, gpt2, mixtral])
def test_without_its_adapters_a_model_is_what_it_was_to_the_bit(make: Any) -> None:
    """Experts too, whose adapters are added to their weights; and afterwards it has them again."""
    lm = make()
    before = lm(IDS).logits
    add_lora(lm, LoraSettings(rank=3, alpha=6), "causal", seed=0)
    trained(lm)
    adapted = lm(IDS).logits
    learning = {name for name, p in lm.named_parameters() if p.requires_grad}
    with adapters_off(lm):
        assert torch.equal(lm(IDS).logits, before)
    assert not torch.equal(adapted, before)
    assert torch.equal(lm(IDS).logits, adapted)
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == learning


def test_adapters_take_the_models_dtype() -> None:
    lm = causal().to(torch.bfloat16)
    add_lora(lm, LoraSettings(rank=2), "causal", seed=0)
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("reentrant", [True, False])
def test_every_adapter_gets_a_gradient_under_activation_checkpointing(reentrant: bool) -> None:
    plain, recomputed = causal(), causal()
    for lm in (plain, recomputed):
        add_lora(lm, LoraSettings(rank=2), "causal", seed=0)
        trained(lm)
        lm.train()
    recomputed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for lm in (plain, recomputed):
        lm(IDS).logits.square().sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert (one.grad is not None) == is_adapter(name)
        if one.grad is not None:
            assert one.grad.abs().max() > 0
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_porj", "v_proj"), "'q_porj' is no layer of LlamaForCausalLM; near are q_proj"),
        (("all-linear",), "'all-linear' is no layer .*give all-linear, without brackets"),
        (("lm_head",), "'lm_head' is the model's head, which has no adapter"),
        (("mlp",), "'mlp' is model.layers.0.mlp, a LlamaMLP; adapters are for linear layers, here down_proj"),
        (("embed_tokens",), "'embed_tokens' is model.embed_tokens, a Embedding"),
        (("proj",), "'proj' is no layer"),
    ],
)
def test_names_that_cannot_have_an_adapter_are_refused(targets: tuple[str, ...], message: str) -> None:
    lm = causal()
    with pytest.raises(SettingsError, match=message) as caught:
        add_lora(lm, LoraSettings(rank=2, target_modules=targets), "causal", seed=0)
    assert "\n" not in str(caught.value)
    assert all(not is_adapter(name) for name, _ in lm.named_parameters())


def test_an_adapter_on_a_score_head_is_refused() -> None:
    with pytest.raises(SettingsError, match="'score' is the model's head"):
        add_lora(reward(), LoraSettings(rank=2, target_modules=("score",)), "reward", seed=0)


@pytest.mark.parametrize(("make", "task"), [(causal, "causal"), (reward, "reward"), (mixtral, "causal")])
def test_the_adapters_file_is_the_one_that_peft_writes(make: Any, task: Any, tmp_path: Path) -> None:
    lm = make()
    theirs = get_peft_model(
        copy.deepcopy(lm),
        LoraConfig(task_type={"causal": "CAUSAL_LM", "reward": "SEQ_CLS"}[task], r=2, target_modules="all-linear"),
    )
    add_lora(lm, LoraSettings(rank=2), task, seed=0)
    trained(lm)
    trained(theirs)  # pyright: ignore[reportArgumentType]
    theirs.save_pretrained(str(tmp_path))
    expected = load_file(tmp_path / "adapter_model.safetensors")
    ours = adapter_state(named(lm))
    assert set(ours) == set(expected)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (causal, "causal"),
        (lambda: causal(tie_word_embeddings=True), "causal"),
        (reward, "reward"),
        (gpt2, "causal"),
        (qwen2, "causal"),
        (mixtral, "causal"),
    ],
)
def test_merged_weights_are_pefts(make: Any, task: Any) -> None:
    lm = make()
    names = [name for name, _ in lm.named_parameters()]
    add_lora(lm, LoraSettings(rank=4, alpha=10), task, seed=0)
    trained(lm)
    ours = dict(merged_state(lm, named(lm)))
    config = LoraConfig(
        task_type={"causal": "CAUSAL_LM", "reward": "SEQ_CLS"}[task], r=4, lora_alpha=10, target_modules="all-linear"
    )
    theirs: Any = get_peft_model(make(), config)
    trained(theirs)
    expected = dict(theirs.merge_and_unload().named_parameters())
    assert sorted(ours) == sorted(names)
    for name in names:
        torch.testing.assert_close(ours[name], expected[name].detach(), rtol=1e-6, atol=1e-6)
        assert ours[name].is_contiguous()
    assert any(not torch.equal(ours[name], parameter) for name, parameter in make().named_parameters())


def test_merging_bfloat16_rounds_once() -> None:
    lm = causal().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    add_lora(lm, LoraSettings(rank=4, alpha=10, target_modules=("up_proj",)), "causal", seed=0)
    trained(lm)
    given = {name: tensor.double() for name, tensor in named(lm)}
    layer = "model.layers.0.mlp.up_proj"
    exact = given[f"{layer}.base_layer.weight"] + 10 / 4 * (
        given[f"{layer}.lora_B.default.weight"] @ given[f"{layer}.lora_A.default.weight"]
    )
    merged = dict(merged_state(lm, named(lm)))[f"{layer}.weight"]
    assert merged.dtype == torch.bfloat16
    # Half a unit in the last of 8 significant bits, and float32's own rounding.
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_a_model_without_adapters_is_its_own_merged_state() -> None:
    lm = causal()
    assert [name for name, _ in merged_state(lm, named(lm))] == [name for name, _ in lm.named_parameters()]
    assert adapter_state(named(lm)) == {}


def test_parameter_names_map_to_those_of_the_model() -> None:
    lm, plain = reward(), reward()
    add_lora(lm, LoraSettings(rank=2), "reward", seed=0)
    mapped = [hugging_face_name(name) for name, _ in lm.named_parameters()]
    assert [name for name in mapped if name is not None] == [name for name, _ in plain.named_parameters()]


def test_a_layer_whose_adapter_is_missing_is_refused() -> None:
    lm = causal()
    add_lora(lm, LoraSettings(rank=2), "causal", seed=0)
    some = [(name, tensor) for name, tensor in named(lm) if "1.mlp.up_proj.lora_B" not in name]
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight are not complete"):
        dict(merged_state(lm, some))


def test_an_adapter_that_is_no_plain_sum_is_refused() -> None:
    lm = causal()
    get_peft_model(lm, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(SettingsError, match=r"q_proj is a variant of LoRA.*merge it with peft"):
        dict(merged_state(lm, named(lm)))


def test_qlora_is_nf4_with_quantised_constants() -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    config = nf4_config(torch.bfloat16)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
    assert config.bnb_4bit_compute_dtype == config.bnb_4bit_quant_storage == torch.bfloat16


def test_adapters_are_refused_with_tensor_parallelism_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"lora with trainer.tensor_parallel 2: .*use trainer.zero_stage 3"):
        RmSettings(
            lora=LoraSettings(rank=2),
            optimizer=OptimizerSettings(lr=1e-3),
            batch_size=2,
            max_len=8,
            max_steps=1,
            trainer=TrainerSettings(ranks=2, tensor_parallel=2),
        )


def test_a_mixture_of_experts_has_adapters_on_its_experts_and_takes_no_dropout() -> None:
    lm = mixtral()
    before = lm(IDS).logits
    add_lora(lm, LoraSettings(rank=2), "causal", seed=0)
    torch.testing.assert_close(lm(IDS).logits, before)
    first = [name.split("layers.0.")[1] for name, _ in named(lm) if "layers.0." in name and "lora_A" in name]
    attention = {f"self_attn.{matrix}_proj" for matrix in "qkvo"}
    assert {name.split(".lora_A")[0] for name in first} == {
        *attention,
        "mlp.gate",
        "mlp.experts",
        "mlp.experts.base_layer",
    }
    with pytest.raises(SettingsError, match=r"lora: .*does not work with lora_dropout"):
        add_lora(mixtral(), LoraSettings(rank=2, dropout=0.1), "causal", seed=0)
