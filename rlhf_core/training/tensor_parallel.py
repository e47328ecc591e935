"""Tensor parallelism by DeepSpeed's AutoTP: what of a model is divided, and whole tensors out of the ranks' parts."""

from typing import Any

import torch
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from torch import Tensor

from rlhf_core.config.base import SettingsError


def tensor_parallel_config(lm: Any, size: int) -> dict[str, Any]:
    """DeepSpeed's `tensor_parallel` section: the layers divided as Hugging Face's plan of the model says.

    Embeddings and heads stay whole on every rank, so that log-probs see the whole vocabulary.

    Raises SettingsError for a model without a plan, or with one that AutoTP cannot follow.
    """
    plan = lm.config.base_model_tp_plan
    if not plan:
        raise SettingsError(
            f"trainer.tensor_parallel {size}: transformers has no tensor-parallel plan for models of type "
            f"{lm.config.model_type}; use tensor_parallel 1"
        )
    layers = {name: style for name, style in plan.items() if style not in _WHOLE}
    try:
        specs = TPPlanConverter.convert(layers) or []
    except ValueError as error:
        raise SettingsError(
            f"trainer.tensor_parallel {size}: models of type {lm.config.model_type}: {error}; use tensor_parallel 1"
        ) from None
    return {
        "autotp_size": size,
        "vocab_parallel_lm_head": False,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {
                    "patterns": spec.patterns,
                    "partition_type": spec.partition_type.value,
                    "grad_allreduce": spec.grad_allreduce,
                }
                for spec in specs
            ],
        },
    }


_WHOLE = {"embedding_rowwise", "colwise_rep", "colwise_gather_output"}  # embeddings and heads


@torch.no_grad()
def whole_tensor(parameter: Any, part: Tensor) -> Tensor:
    """All ranks' parts of a tensor that is divided as `parameter` is; `part` itself if that is whole everywhere."""
    own = parameter.data
    parameter.data = part
    try:
        with GatherReplacedLayerParams([parameter], parameter):
            return parameter.data.clone()
    finally:
        parameter.data = own  # a view into ZeRO's flat buffer, which the context would replace by a copy
