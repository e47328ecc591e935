"""Low-rank adapters (Hu et al. 2021) in a Hugging Face model, and the whole weights they stand for.

peft puts adapters into the model itself, so `lm` stays a PreTrainedModel. Its parameters are then named

    <layer>.base_layer.weight                            frozen
    <layer>.lora_A.default.weight, lora_B.default.weight
    <experts>.base_layer.down_proj                       frozen; <experts>.lora_A, lora_B as above
    score.original_module.weight                         frozen, unused
    score.modules_to_save.default.weight                 a reward model's head, trained whole

and below are the functions that turn such names and tensors into those of the model without adapters.

Legend: A (rank, in) and B (out, rank) are an adapter's matrices; it adds scaling * B A to a weight (out, in).
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config.base import SettingsError
from rlhf_core.config.training import LoraSettings

Task = Literal["causal", "reward"]  # a process model is a causal one
PEFT_TASK = {"causal": "CAUSAL_LM", "reward": "SEQ_CLS"}
ADAPTER = "default"
PEFT_PREFIX = "base_model.model."  # in the names of an adapter's file

_BASE = re.compile(r"\.base_layer(?=\.|$)")
_SAVED = f".modules_to_save.{ADAPTER}."
_ORIGINAL = ".original_module."
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def add_lora(lm: PreTrainedModel, settings: LoraSettings, task: Task, seed: int) -> None:
    """Freezes `lm` and puts adapters into it, of its own dtype: bfloat16 ones get float32 masters from DeepSpeed.

    A reward model's head `score` is copied, as it is, and trained whole. B starts at 0, so outputs are unchanged; A is
    a function of the seed, whatever was drawn before. Works on weights that ZeRO-3 has partitioned.

    Raises SettingsError for target_modules that cannot have an adapter.
    """
    all_linear = settings.target_modules == "all-linear"
    if not all_linear:
        _check_targets(lm, settings.target_modules)
    config = LoraConfig(
        task_type=PEFT_TASK[task],
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType] - a whole number by peft's annotation alone
        lora_dropout=settings.dropout,
        target_modules="all-linear" if all_linear else list(settings.target_modules),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # What it returns is a shell around lm, which it has changed in place.
        try:
            get_peft_model(lm, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
        except ValueError as error:  # such as dropout on experts
            raise SettingsError(f"lora: {' '.join(str(error).split())}") from error


def _check_targets(lm: PreTrainedModel, targets: Iterable[str]) -> None:
    """Raises SettingsError for a name that no layer ends with, or that means something else than a linear layer."""
    modules = {name: module for name, module in lm.named_modules() if name}
    linear = sorted({name.rsplit(".", 1)[-1] for name, module in modules.items() if _is_linear(module)})
    heads = (lm.get_output_embeddings(), dict(lm.named_children()).get("score"))
    for target in targets:
        found = {name: module for name, module in modules.items() if f".{name}".endswith(f".{target}")}
        if any(module is head for module in found.values() for head in heads):
            raise SettingsError(
                f"lora.target_modules: {target!r} is the model's head, which has no adapter (a score head is trained "
                f"whole); leave it out"
            )
        wrong = sorted(name for name, module in found.items() if not _is_linear(module))
        if wrong:
            raise SettingsError(
                f"lora.target_modules: {target!r} is {wrong[0]}, a {type(modules[wrong[0]]).__name__}; adapters are "
                f"for linear layers, here {', '.join(linear)}"
            )
        if not found:
            near = difflib.get_close_matches(target, linear, n=3) or linear
            raise SettingsError(
                f"lora.target_modules: {target!r} is no layer of {type(lm).__name__}; near are {', '.join(near)}; or "
                f"give all-linear, without brackets"
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """QLoRA's frozen weights (Dettmers et al. 2023): NF4 with quantised constants, computed in `dtype`.

    Stored as `dtype`, so that adapters take that dtype and ZeRO-3 can partition the weights.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def lora_config(lm: PreTrainedModel) -> LoraConfig | None:
    """The configuration of the adapters in `lm`; None where it has none."""
    configs: dict[str, Any] = getattr(lm, "peft_config", {})  # an attribute that peft adds
    return configs.get(ADAPTER)


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Forward passes are those of the model without its adapters, a head that is trained whole excepted.

    Adapters are scaled by 0 and not left out: ZeRO-3 expects the modules of one pass in the next.
    """
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


# -- names and tensors ------------------------------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to the adapter, a head that is trained whole included."""
    return name.endswith((_A, _B)) or _SAVED in name


def adapter_state(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """An adapter's file, as peft names it, from the model's (parameter name, whole tensor)."""
    return {
        PEFT_PREFIX + name.replace(_SAVED, ".").replace(f".{ADAPTER}.weight", ".weight"): tensor
        for name, tensor in named
        if is_adapter(name)
    }


def hugging_face_name(name: str) -> str | None:
    """The name without adapters of a parameter that has one; None for adapters and for a head that was replaced."""
    if _ORIGINAL in name or name.endswith((_A, _B)):
        return None
    return _BASE.sub("", name).replace(_SAVED, ".")


def merged_state(lm: PreTrainedModel, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of the model without adapters: W + scaling * B A in their places.

    Computed in float32 and rounded once, to W's dtype. Of a model without adapters: `named` itself.

    Args:
        named: (parameter name in lm, whole tensor), in the order of `lm.named_parameters()` or any other in which a
            layer's three tensors lie near one another: a weight is held until its adapter has come.

    Raises SettingsError for adapters that are more than W + scaling * B A, such as DoRA's.
    """
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    _check_plain(layers)
    weights = {name: _weight_name(name, layer) for name, layer in layers.items()}
    adapted = {weights[name]: layer for name, layer in layers.items()}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        weight, part = hugging_face_name(name), "base"
        for suffix, matrix in ((_A, "a"), (_B, "b")):
            if name.endswith(suffix):
                weight, part = weights[name.removesuffix(suffix)], matrix
        if weight not in adapted:
            if weight is not None:
                yield weight, tensor
            continue
        parts = waiting.setdefault(weight, {})
        parts[part] = tensor
        if len(parts) == 3:
            yield weight, _merged(adapted[weight], **waiting.pop(weight))
    if waiting:
        raise ValueError(f"the parameters given for {', '.join(sorted(waiting))} are not complete")


def _weight_name(name: str, layer: Any) -> str:
    """The Hugging Face name of the weight that a layer of peft adapts. Wrappers of one module's parameters nest."""
    parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    return f"{_BASE.sub('', name)}.{parameter}"


def _merged(layer: Any, *, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.float(), b.float()
    if base.dim() == 3:  # all experts' weights: A holds their matrices one below the other, B interleaved
        experts = len(base)
        a_ERI, b_ORE = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts)
        order = "eoi" if layer._did_swap_in_out_features else "eio"
        delta = torch.einsum(f"ore,eri->{order}", b_ORE, a_ERI)
    else:
        delta = b @ a
    if layer.fan_in_fan_out:  # GPT-2's Conv1D holds its weight as (in, out)
        delta = delta.T
    return (delta * layer.scaling[ADAPTER]).add_(base).to(base.dtype).contiguous()


def _check_plain(layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        known = isinstance(layer, LoraLinear | ParamWrapper)
        if not known or layer.lora_variant or any(layer.lora_bias.values()):
            kind = "a variant of LoRA" if known else f"in a {type(layer).__name__}"
            raise SettingsError(
                f"the adapter of {name} is {kind}, and only W + scaling * B A of linear layers is merged here; merge "
                f"it with peft"
            )
