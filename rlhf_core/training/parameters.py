"""Which parameters are trained, and by what: freezing by name, weight decay, Muon or AdamW."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlhf_core.config.base import SettingsError
from rlhf_core.config.training import OptimizerSettings


def bare_name(name: str) -> str:
    """A parameter's name in the Hugging Face model, which our modules hold as `lm`."""
    return name.removeprefix("lm.")


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose Hugging Face name one of the regular expressions finds get no gradient and no update.

    Raises SettingsError for an expression that is none or finds nothing, or if nothing is left to train.
    """
    named = {bare_name(name): parameter for name, parameter in module.named_parameters()}
    for pattern in patterns:
        try:
            found = [name for name in named if re.search(pattern, name)]
        except re.error as error:
            raise SettingsError(f"freeze: {pattern!r} is no regular expression ({error})") from None
        if not found:
            near = difflib.get_close_matches(pattern, list(named), n=3, cutoff=0.0)
            raise SettingsError(f"freeze: {pattern!r} finds no parameter; there are e.g. {', '.join(near)}")
        for name in found:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise SettingsError(f"freeze: {list(patterns)} leaves nothing to train; freeze less")


def parameter_groups(module: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """The trained parameters by what updates them. Biases and norms (one dimension) are not decayed."""
    hidden = _hidden_matrices(module) if settings.name == "muon" else set()
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups.setdefault((id(parameter) in hidden, _dimensions(parameter) > 1), []).append(parameter)
    made = []
    for (muon, decayed), members in groups.items():
        group: dict[str, Any] = {"params": members, "weight_decay": settings.weight_decay if decayed else 0.0}
        if settings.name == "muon":
            own = {"lr": settings.muon_lr, "momentum": settings.muon_momentum} if muon else _adam_group(settings)
            group |= {"use_muon": muon, "name": "muon" if muon else f"adamw {'decayed' if decayed else 'other'}", **own}
        made.append(group)
    return made


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's Muon, which updates the other groups by an AdamW of its own."""
    # Imported here: it compiles its kernels.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for group in groups:
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]  # where ZeRO looks
    return MuonWithAuxAdam(groups)


def _adam_group(settings: OptimizerSettings) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}


def _hidden_matrices(module: Any) -> set[int]:
    """ids of the matrices of the backbone's layers: neither embeddings, nor the output head or a score's."""
    backbone = getattr(module.lm, module.lm.base_model_prefix)
    embeddings = {id(p) for m in backbone.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return {id(p) for p in backbone.parameters() if _dimensions(p) == 2} - embeddings


def _dimensions(parameter: Any) -> int:
    """Of the whole tensor, which is `ds_shape` under ZeRO-3."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
