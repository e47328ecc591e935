"""From settings to DeepSpeed's configuration, and the learning rate's schedule."""

import math
from collections.abc import Callable
from typing import Any

from rlhf_core.config.training import Dtype, OptimizerSettings, TrainerSettings
from rlhf_core.training.mesh import zero_stage
from rlhf_core.training.process import accelerator

_DTYPE_NAME = {"float32": "fp32", "bfloat16": "bf16"}


def ds_config(dtype: Dtype, trainer: TrainerSettings, optimizer: OptimizerSettings | None) -> dict[str, Any]:
    """DeepSpeed's configuration. Gradient accumulation is 1: the engine sets the boundaries itself."""
    trained = optimizer is not None
    stage = zero_stage(dtype, trainer, trained=trained)
    zero: dict[str, Any] = {"stage": stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
        zero["zero_hpz_partition_size"] = trainer.zpg
    if optimizer is None:
        return config
    # Under ZeRO the norm that DeepSpeed clips is that of Muon's updates: it would undo their scale.
    config["gradient_clipping"] = optimizer.max_grad_norm if optimizer.name == "adamw" else 0.0
    if stage:
        zero["overlap_comm"] = trainer.overlap_comm
    if dtype != "float32":
        # Gradients of many micro-batches add up in float32: in bfloat16 small ones would be swallowed.
        config["data_types"] = {"grad_accum_dtype": _DTYPE_NAME[trainer.grad_accum_dtype or "float32"]}
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not _on_cpu()}
    if trainer.sequence_parallel > 1:
        config["sequence_parallel_size"] = trainer.sequence_parallel
    if trainer.deepcompile:
        config["compile"] = {"deepcompile": True}
    if optimizer.name == "adamw":
        config["optimizer"] = {"type": "AdamW", "params": _adam(optimizer)}
    else:
        zero["reduce_scatter"] = False  # Muon orthogonalises whole matrices; DeepSpeed refuses it otherwise
        config["zero_force_ds_cpu_optimizer"] = False  # Muon is no optimizer of DeepSpeed's configuration here
    return config


def _adam(optimizer: OptimizerSettings) -> dict[str, Any]:
    params: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
    if _on_cpu():
        params["torch_adam"] = True  # the fused Adam is a CUDA kernel, and the CPU's is compiled at its first use
    return params


def _on_cpu() -> bool:
    return accelerator().device_name() == "cpu"


_INVERSE_SQRT_STEPS = 10_000  # the time scale of inverse_sqrt where no step warms up; transformers' number


def lr_factor(settings: OptimizerSettings, total_steps: int) -> Callable[[int], float]:
    """Step, from 0 -> share of the peak learning rate: linear warm-up, then the schedule, never below the floor.

    wsd is Hu et al. 2024 (MiniCPM) with a linear fall; it and inverse_sqrt are transformers' functions of these names.
    """
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    floor = settings.min_lr_ratio
    decay_steps = min(round(settings.decay_ratio * total_steps), total_steps - warmup)

    def falling(since: int) -> float:
        """From 1 to 0, `since` steps after the warm-up."""
        match settings.schedule:
            case "constant":
                return 1.0
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * min(1.0, since / max(1, total_steps - warmup))))
            case "linear":
                return 1 - min(1.0, since / max(1, total_steps - warmup))
            case "wsd":
                return min(1.0, max(0.0, (total_steps - warmup - since) / max(1, decay_steps)))
            case "inverse_sqrt":
                scale = warmup or _INVERSE_SQRT_STEPS
                return math.sqrt(scale / (since + scale))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        share = falling(step - warmup)
        # 1 / sqrt has no end that could be set to the floor: it falls until it reaches it.
        return max(floor, share) if settings.schedule == "inverse_sqrt" else floor + (1 - floor) * share

    return factor
