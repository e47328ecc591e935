"""The program that ranks run to cut the steps of cut_kinds.py, and the modules that it trains.

Torch and DeepSpeed are imported inside the functions alone: this file is loaded in ranks before they have joined.
"""

# pyright: reportMissingImports=false
# The modules of the tests are found through sys.path, which ranks.py has set.

from collections.abc import Sequence
from typing import Any

from engine_parts import PAD
from engine_programs import GRADIENT_LR
from lora_programs import LORA, SEED, VERDICTS

PLACEHOLDER = 20


def gradient(
    rank: int,
    ranks: int,
    *,
    kind: str,
    lora: bool,
    model: str,
    items: Sequence[Any],
    objective: Any,
    extra: dict[str, float],
    trainer: dict[str, Any],
) -> dict[str, Any]:
    """Loss and gradient of one optimizer step, as engine_programs.gradient reads it off AdamW's first update.

    extra: scalars that stand in every batch of the step. The gradient is that of the trained parameters, by name.
    """
    import torch

    from rlhf_core.config.training import OptimizerSettings, TrainerSettings
    from rlhf_core.data.layout import Layout, make_batch, plan_step
    from rlhf_core.training.engine import TrainEngine

    settings = TrainerSettings(**trainer)
    optimizer = OptimizerSettings(lr=GRADIENT_LR, eps=1.0, schedule="constant", warmup_ratio=0.0, max_grad_norm=1e9)
    engine = TrainEngine(
        lambda: build(kind, model, lora=lora, zero_stage=settings.zero_stage),
        dtype="float32",
        trainer=settings,
        optimizer=optimizer,
        total_steps=10,
    )
    lengths = [item.tokens for item in items]
    multiple = settings.sequence_parallel
    layout = Layout(engine.mesh.data_ranks, settings.micro_batch_size, settings.packing, 2 * max(lengths), multiple)
    plan = plan_step(lengths, layout)[engine.mesh.data_rank]
    batches = [make_batch(items, micro, layout, PAD) for micro in plan]
    scalars = {name: torch.tensor(value) for name, value in extra.items()}
    before = trained_parameters(engine)
    result = engine.step([{**batch, **scalars} for batch in batches], objective)
    after = trained_parameters(engine)
    engine.close()
    updates = {name: (before[name] - after[name]) / GRADIENT_LR for name in after} if rank == 0 else {}
    return {
        "loss": result.loss,
        "gradient": {name: update / (1 - abs(update)) for name, update in updates.items()},
        "micro-batches": len(batches),
    }


def trained_parameters(engine: Any) -> dict[str, Any]:
    """Whole arrays, float64, by their names in the Hugging Face model with its adapters."""
    from rlhf_core.training.engine import gathered
    from rlhf_core.training.parameters import bare_name
    from rlhf_core.training.tensor_parallel import whole_tensor

    named = [(bare_name(name), p) for name, p in engine.module.named_parameters() if p.requires_grad]
    with gathered([parameter for _, parameter in named], engine.zero_stage):
        return {name: whole_tensor(parameter, parameter.detach()).double().numpy() for name, parameter in named}


def build(kind: str, model: str, *, lora: bool, zero_stage: int) -> Any:
    """The module that is trained."""
    import torch
    from engine_parts import module_of

    from rlhf_core.models.process_scorer import StepTokens, load_process_scorer

    if kind == "prm":
        tokens = StepTokens(PLACEHOLDER, VERDICTS, "\n")
        return load_process_scorer(model, tokens=tokens, dtype=torch.float32, attention="sdpa")
    module = module_of("rm" if kind == "rm" else "sft", model, "float32", PAD)
    if lora:
        adapt(module.lm, zero_stage)
    return module


def adapt(lm: Any, zero_stage: int = 0) -> None:
    """Adapters with both matrices drawn: while B is 0, as when training starts, A has no gradient."""
    import torch

    from rlhf_core.config.training import LoraSettings
    from rlhf_core.models.lora import add_lora
    from rlhf_core.training.engine import gathered

    add_lora(lm, LoraSettings(**LORA), "causal", SEED)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in lm.named_parameters():
        if ".lora_B." in name:
            with gathered([parameter], zero_stage, modifier_rank=0), torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
