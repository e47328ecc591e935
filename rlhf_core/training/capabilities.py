"""What this installation and this machine can run: settings that cannot work are refused before ranks start.

Loads without torch, and asks for packages without importing them.
"""

import importlib.util
from typing import Any

from rlhf_core.config.base import SettingsError
from rlhf_core.config.training import TrainerSettings


def check_machine(settings: Any, *, cuda: bool) -> None:
    """Raises SettingsError for what needs an NVIDIA GPU or a package that is not there.

    settings: of a trained stage. cuda: whether the ranks will have such GPUs.
    """
    trainer: TrainerSettings = settings.trainer
    wanted = {
        "dtype float16": (settings.dtype == "float16", None, "dtype bfloat16"),
        "trainer.attention flash_attention_2": (
            trainer.attention == "flash_attention_2",
            "flash_attn",
            "trainer.attention sdpa",
        ),
        "trainer.liger": (trainer.liger, "liger_kernel", "trainer.liger false"),
        "trainer.deepcompile": (trainer.deepcompile, None, "trainer.deepcompile false"),
        "lora.load_in_4bit": (_in_4bit(settings), "bitsandbytes", "lora.load_in_4bit false"),
    }
    for name, (asked, package, instead) in wanted.items():
        if not asked:
            continue
        if not cuda:
            raise SettingsError(f"{name} needs an NVIDIA GPU, and the ranks have none here; use {instead}")
        if package is not None and importlib.util.find_spec(package) is None:
            raise SettingsError(f"{name} needs the package {package}, which is not installed; use {instead}")


def check_combination(settings: Any) -> None:
    """Raises SettingsError for trainer settings that exclude one another, or that DeepSpeed cannot combine."""
    trainer: TrainerSettings = settings.trainer
    tensor, sequence = trainer.tensor_parallel, trainer.sequence_parallel
    shared = tensor * sequence > 1
    low = settings.dtype != "float32"
    critic = _field(settings, "critic")
    trained = [settings] if critic is None else [settings, critic]
    faults = {
        f"trainer.ranks {trainer.ranks} is no multiple of tensor_parallel {tensor} x sequence_parallel {sequence}": (
            trainer.ranks % (tensor * sequence) > 0
        ),
        "trainer.tensor_parallel and sequence_parallel are not combined by DeepSpeed; set one of them to 1": (
            tensor > 1 and sequence > 1
        ),
        "trainer.packing with sequence_parallel needs attention flash_attention_2, which alone keeps samples apart "
        "there; set packing false": (sequence > 1 and trainer.packing and trainer.attention != "flash_attention_2"),
        "trainer.sequence_parallel has no attention eager; use sdpa": sequence > 1 and trainer.attention == "eager",
        "trainer.attention flash_attention_2 has no dtype float32; use dtype bfloat16 or attention sdpa": (
            trainer.attention == "flash_attention_2" and not low
        ),
        "optimizer.name muon wants whole matrices on each rank; set tensor_parallel and sequence_parallel to 1": (
            shared and any(one.optimizer.name == "muon" for one in trained)
        ),
        "aux_loss_coef with sequence_parallel: each rank's router sees a part of the tokens; leave one of them out": (
            sequence > 1 and any(one.aux_loss_coef for one in trained)
        ),
        f"trainer.zpg {trainer.zpg} is a second partition of ZeRO-3, and zero_stage is {trainer.zero_stage}": (
            trainer.zpg > 1 and trainer.zero_stage != 3
        ),
        f"trainer.zpg {trainer.zpg} must divide trainer.ranks {trainer.ranks}": trainer.ranks % trainer.zpg > 0,
        "trainer.offload_optimizer needs zero_stage 1 or more": (
            trainer.offload_optimizer and trainer.zero_stage == 0 and not low and not shared
        ),
        "trainer.grad_accum_dtype bfloat16 goes with dtype bfloat16; float32 gradients add up in float32": (
            trainer.grad_accum_dtype == "bfloat16" and not low
        ),
        "trainer.activation_checkpointing_reentrant is a variant of activation_checkpointing; set that too": (
            trainer.activation_checkpointing_reentrant and not trainer.activation_checkpointing
        ),
    }
    for message, wrong in faults.items():
        if wrong:
            raise SettingsError(message)


def check_model(trainer: TrainerSettings, config: Any, *, max_len: int, aux_loss_coef: float = 0.0) -> None:
    """Raises SettingsError for what a stage asks of a model that this Hugging Face configuration lacks.

    max_len: longest sequence, tokens.
    """
    check_heads(trainer, config)
    text = config.get_text_config()
    values = text.to_dict()
    # Of a hybrid family's models some have no experts, with the count of 0.
    experts = values.get("num_local_experts", values.get("num_experts", 1))
    routed = "output_router_logits" in values and values.get("num_experts_per_tok") and experts
    if aux_loss_coef and not routed:
        raise SettingsError(
            f"aux_loss_coef {aux_loss_coef} balances the load of experts, and the model of type "
            f"{text.model_type} has none that are known here; leave aux_loss_coef out"
        )
    if trainer.sequence_parallel > 1:
        _check_reach(trainer, max_len, text, values)


# Kinds of layers that Ulysses serves, which exchange columns or see one token: the field that says how far they reach.
_REACH = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "mlp": None,
    "moe": None,
}


def _check_reach(trainer: TrainerSettings, max_len: int, text: Any, values: dict[str, Any]) -> None:
    """Of sequence-parallel ranks: layers that do not exchange columns, and windows that sdpa forgets without a mask."""
    size, attention = trainer.sequence_parallel, trainer.attention
    default = "sliding_attention" if values.get("use_sliding_window", True) else "full_attention"
    # Of some hybrid families a property, which is not among the values.
    kinds = sorted(set(getattr(text, "layer_types", None) or [default]))
    unknown = [kind for kind in kinds if kind not in _REACH]
    if unknown:
        raise SettingsError(
            f"sequence_parallel {size}: layers of kind {', '.join(unknown)} of models of type {text.model_type} see "
            f"their own rank's tokens alone; set sequence_parallel to 1"
        )
    for field in filter(None, map(_REACH.get, kinds)):
        reach = values.get(field)
        if attention == "sdpa" and reach is not None and reach < max_len:
            raise SettingsError(
                f"trainer.sequence_parallel {size} with attention sdpa forgets the model's {field} {reach}, which is "
                f"below max_len {max_len}; use attention flash_attention_2, or sequence_parallel 1"
            )


def check_heads(trainer: TrainerSettings, config: Any) -> None:
    """Raises SettingsError if ranks cannot share the attention heads of a model of this Hugging Face configuration."""
    tensor, sequence = trainer.tensor_parallel, trainer.sequence_parallel
    if tensor * sequence == 1:
        return
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)  # under whatever name the family keeps it
    if heads is None:
        name, size = ("tensor_parallel", tensor) if tensor > 1 else ("sequence_parallel", sequence)
        raise SettingsError(
            f"trainer.{name} {size}: models of type {text.model_type} have no attention heads for ranks to share; set "
            f"{name} to 1"
        )
    kv_heads = text.to_dict().get("num_key_value_heads") or heads  # a field of models with grouped queries
    if heads % tensor or kv_heads % tensor:
        raise SettingsError(
            f"trainer.tensor_parallel {tensor} does not divide the model's {heads} attention heads and {kv_heads} "
            f"key-value heads; {_allowed(heads, kv_heads, both=True)} would"
        )
    if heads % sequence or (kv_heads % sequence and sequence % kv_heads):
        raise SettingsError(
            f"trainer.sequence_parallel {sequence} cannot share the model's {heads} attention heads and {kv_heads} "
            f"key-value heads; {_allowed(heads, kv_heads, both=False)} can"
        )


def _allowed(heads: int, kv_heads: int, *, both: bool) -> str:
    shared = (n for n in range(1, heads + 1) if heads % n == 0)
    return ", ".join(str(n) for n in shared if kv_heads % n == 0 or (not both and n % kv_heads == 0))


def _field(settings: Any, name: str) -> Any:
    """A field that not all trained stages have."""
    return getattr(settings, name) if name in type(settings).model_fields else None


def _in_4bit(settings: Any) -> bool:
    return settings.lora is not None and settings.lora.load_in_4bit
