"""What cannot run is refused in one line, before ranks start."""

import importlib.util
import inspect
from typing import Any

import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rl import PpoSettings
from rlhf_core.config.supervised import SftSettings
from rlhf_core.config.training import (
    LoraSettings,
    ModelSource,
    OptimizerSettings,
    TrainerSettings,
)
from rlhf_core.training.capabilities import (
    check_combination,
    check_heads,
    check_machine,
    check_model,
)


def settings_of(optimizer: str = "adamw", lora: dict[str, Any] | None = None, **given: Any) -> SftSettings:
    own = {name: given.pop(name) for name in ("dtype", "aux_loss_coef") if name in given}
    return SftSettings(
        model=ModelSource(path="x"),
        optimizer=OptimizerSettings(lr=1.0, name=optimizer),  # type: ignore[arg-type]
        lora=None if lora is None else LoraSettings(rank=2, **lora),
        batch_size=8,
        max_len=8,
        max_steps=1,
        trainer=TrainerSettings(**given),
        **own,
    )


def checked(settings: SftSettings, config: Any) -> None:
    check_model(settings.trainer, config, max_len=settings.max_len, aux_loss_coef=settings.aux_loss_coef)


NEEDS_GPU = [
    ({"dtype": "float16"}, "dtype float16", "dtype bfloat16"),
    ({"attention": "flash_attention_2"}, "trainer.attention flash_attention_2", "trainer.attention sdpa"),
    ({"liger": True}, "trainer.liger", "trainer.liger false"),
    ({"deepcompile": True}, "trainer.deepcompile", "trainer.deepcompile false"),
    ({"lora": {"load_in_4bit": True}}, "lora.load_in_4bit", "lora.load_in_4bit false"),
]


@pytest.mark.parametrize(("given", "name", "instead"), NEEDS_GPU)
def test_what_needs_a_gpu_is_refused_without_one(given: dict[str, Any], name: str, instead: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_machine(settings_of(**given), cuda=False)
    assert str(caught.value) == f"{name} needs an NVIDIA GPU, and the ranks have none here; use {instead}"


@pytest.mark.parametrize(("given", "package"), [({"liger": True}, "liger_kernel"), ({"dtype": "float16"}, None)])
def test_a_missing_package_is_named(given: dict[str, Any], package: str | None) -> None:
    if package is None or importlib.util.find_spec(package) is not None:
        check_machine(settings_of(**given), cuda=True)
        return
    with pytest.raises(SettingsError, match=f"needs the package {package}, which is not installed; use trainer.liger"):
        check_machine(settings_of(**given), cuda=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"ranks": 3, "tensor_parallel": 2},
            "trainer.ranks 3 is no multiple of tensor_parallel 2 x sequence_parallel 1",
        ),
        ({"ranks": 4, "tensor_parallel": 2, "sequence_parallel": 2}, "are not combined by DeepSpeed"),
        ({"ranks": 2, "sequence_parallel": 2, "packing": True}, "needs attention flash_attention_2"),
        ({"ranks": 2, "sequence_parallel": 2, "attention": "eager"}, "has no attention eager; use sdpa"),
        ({"ranks": 2, "sequence_parallel": 2, "optimizer": "muon"}, "muon wants whole matrices on each rank"),
        ({"ranks": 2, "tensor_parallel": 2, "optimizer": "muon"}, "muon wants whole matrices on each rank"),
        ({"ranks": 2, "sequence_parallel": 2, "aux_loss_coef": 0.1}, "aux_loss_coef with sequence_parallel"),
        ({"ranks": 2, "zpg": 2, "zero_stage": 2}, "is a second partition of ZeRO-3, and zero_stage is 2"),
        ({"ranks": 3, "zpg": 2, "zero_stage": 3}, "trainer.zpg 2 must divide trainer.ranks 3"),
        ({"dtype": "float32", "offload_optimizer": True, "zero_stage": 0}, "needs zero_stage 1 or more"),
        ({"dtype": "float32", "grad_accum_dtype": "bfloat16"}, "goes with dtype bfloat16"),
        ({"dtype": "float32", "attention": "flash_attention_2"}, "flash_attention_2 has no dtype float32"),
        ({"activation_checkpointing_reentrant": True}, "is a variant of activation_checkpointing; set that too"),
    ],
)
def test_settings_that_exclude_one_another(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_combination(settings_of(**given))


def ppo_of(critic: dict[str, Any], **trainer: Any) -> PpoSettings:
    return PpoSettings.model_validate(
        {
            "optimizer": {"lr": 1.0},
            "critic": {"optimizer": {"lr": 1.0}, **critic},
            "rollout": {"prompts": 2, "max_new_tokens": 4, "max_prompt_len": 4},
            "reward": {"exact": 1.0},
            "steps": 1,
            "batch_size": 2,
            "trainer": trainer,
        }
    )


@pytest.mark.parametrize(
    ("critic", "shared", "message"),
    [
        ({"optimizer": {"lr": 1.0, "name": "muon"}}, "tensor_parallel", "muon wants whole matrices on each rank"),
        ({"aux_loss_coef": 0.1}, "sequence_parallel", "aux_loss_coef with sequence_parallel"),
    ],
)
def test_a_critic_has_what_excludes_one_another_as_the_policy_has(
    critic: dict[str, Any], shared: str, message: str
) -> None:
    check_combination(ppo_of(critic, ranks=2))
    check_combination(ppo_of({}, ranks=2, **{shared: 2}))
    with pytest.raises(SettingsError, match=message):
        check_combination(ppo_of(critic, ranks=2, **{shared: 2}))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ranks": 4, "tensor_parallel": 2, "packing": True, "zero_stage": 3},
        {"ranks": 4, "sequence_parallel": 2, "lora": {}},
        {"ranks": 2, "sequence_parallel": 2, "packing": True, "attention": "flash_attention_2"},
        {"ranks": 4, "zpg": 2, "zero_stage": 3, "offload_optimizer": True, "grad_accum_dtype": "bfloat16"},
        {"optimizer": "muon", "zero_stage": 3, "ranks": 2},
    ],
)
def test_settings_that_go_together(given: dict[str, Any]) -> None:
    check_combination(settings_of(**given))


@pytest.mark.parametrize(
    ("trainer", "heads", "kv_heads", "message"),
    [
        (
            {"tensor_parallel": 3},
            8,
            4,
            "tensor_parallel 3 does not divide the model's 8 .* 4 key-value heads; 1, 2, 4 ",
        ),
        ({"tensor_parallel": 8}, 8, 4, "tensor_parallel 8 does not divide"),
        ({"sequence_parallel": 3}, 8, 4, "sequence_parallel 3 cannot share .*; 1, 2, 4, 8 can"),
        ({"tensor_parallel": 4}, 8, 4, None),
        ({"sequence_parallel": 8}, 8, 4, None),  # each key-value head goes to two ranks
    ],
)
def test_heads_are_shared_evenly(trainer: dict[str, Any], heads: int, kv_heads: int, message: str | None) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads)
    if message is None:
        check_heads(TrainerSettings(**trainer), config)
        return
    with pytest.raises(SettingsError, match=message):
        check_heads(TrainerSettings(**trainer), config)


@pytest.mark.parametrize("name", ["tensor_parallel", "sequence_parallel"])
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "rwkv"])
def test_a_model_without_attention_heads_has_none_to_share(model_type: str, name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    check_heads(TrainerSettings(ranks=2), config)
    with pytest.raises(SettingsError) as caught:
        check_heads(TrainerSettings(ranks=2, **{name: 2}), config)
    assert str(caught.value) == (
        f"trainer.{name} 2: models of type {model_type} have no attention heads for ranks to share; set {name} to 1"
    )


def test_heads_are_found_under_the_familys_own_name() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gpt2", n_head=6)
    check_heads(TrainerSettings(ranks=3, tensor_parallel=3), config)
    with pytest.raises(SettingsError, match="does not divide the model's 6 attention heads"):
        check_heads(TrainerSettings(ranks=4, tensor_parallel=4), config)


WINDOW = {"sliding_window": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
HYBRID = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
FORGETS = (
    "sequence_parallel 2 with attention sdpa forgets the model's {} 4, which is below max_len 8; use attention flash"
)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("mistral", WINDOW, FORGETS.format("sliding_window")),
        ("gemma3_text", WINDOW, FORGETS.format("sliding_window")),
        ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, FORGETS.format("sliding_window")),
        ("llama4_text", {**HYBRID, "attention_chunk_size": 4}, FORGETS.format("attention_chunk_size")),
        ("lfm2", {**HYBRID, "layer_types": ["conv", "full_attention"]}, "layers of kind conv of models of type lfm2"),
        ("bamba", {**HYBRID, "mamba_n_heads": 64}, "layers of kind linear_attention of models of type bamba"),
        ("mistral", {**WINDOW, "sliding_window": 8}, None),  # max_len
        ("mistral", {**WINDOW, "sliding_window": None}, None),
        ("qwen2", {**WINDOW, "use_sliding_window": False}, None),
        ("qwen2_moe", {**WINDOW, "use_sliding_window": False}, None),
        ("llama", HYBRID, None),
    ],
)
def test_sequence_parallel_ranks_see_what_the_model_sees(
    model_type: str, config: dict[str, Any], message: str | None
) -> None:
    from transformers import AutoConfig

    made = AutoConfig.for_model(model_type, **config)
    checked(settings_of(), made)
    shared = settings_of(ranks=2, sequence_parallel=2)
    if message is None:
        checked(shared, made)
        return
    with pytest.raises(SettingsError, match=message):
        checked(shared, made)
    if "sdpa" in message:
        checked(settings_of(ranks=2, sequence_parallel=2, attention="flash_attention_2"), made)


@pytest.mark.parametrize(
    ("model_type", "config", "routed"),
    [
        ("llama", {}, False),
        ("granitemoehybrid", {"num_local_experts": 0}, False),
        ("granitemoehybrid", {}, True),
        ("mixtral", {}, True),
        ("qwen3_moe", {}, True),
        ("deepseek_v3", {}, True),
    ],
)
def test_balancing_the_load_of_experts_wants_experts(model_type: str, config: dict[str, Any], routed: bool) -> None:
    from transformers import AutoConfig

    made = AutoConfig.for_model(model_type, **config)
    checked(settings_of(), made)
    if routed:
        checked(settings_of(aux_loss_coef=0.5), made)
        return
    with pytest.raises(SettingsError, match=f"aux_loss_coef 0.5 .* of type {model_type} has none"):
        checked(settings_of(aux_loss_coef=0.5), made)


@pytest.mark.engines
def test_calls_that_no_machine_of_ours_makes_fit_the_libraries() -> None:
    from deepspeed.runtime.compiler import is_compile_supported
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert is_compile_supported()
    inspect.signature(DeepSpeedEngine.compile).bind(None)
    config = DeepSpeedConfig({"train_batch_size": 1, "compile": {"deepcompile": True}})
    assert config.compile_config.deepcompile
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        inspect.signature(_apply_liger_kernel_to_instance).bind(model=None)
