"""Programs with adapters that ranks.py runs in trainer ranks. Torch and DeepSpeed are imported inside them alone."""

from collections.abc import Sequence
from typing import Any

LORA = {"rank": 2, "alpha": 8.0}
SEED = 7
VERDICTS = (21, 22, 25)


def train_lora(
    rank: int,
    ranks: int,
    *,
    kind: str,
    model: str,
    trainer: dict[str, Any],
    optimizer: dict[str, Any],
    samples: Sequence[Any],
    steps: int,
    directory: str,
    dtype: str = "float32",
    in_4bit: bool = False,
) -> dict[str, Any]:
    """Steps on the same samples and the export. Each step's loss, and the dtypes of what the optimizer updates."""
    import torch
    from engine_parts import batches_of

    from rlhf_core.config.training import OptimizerSettings, TrainerSettings
    from rlhf_core.training.engine import TrainEngine
    from rlhf_core.training.masters import fragments

    torch.manual_seed(100 * rank)  # as a trainer does: ranks draw different numbers
    engine = TrainEngine(
        lambda: with_adapters(kind, model, dtype, in_4bit),
        dtype=dtype,  # type: ignore[arg-type]
        trainer=TrainerSettings(**trainer),
        optimizer=OptimizerSettings(**optimizer),
        total_steps=steps,
    )
    batches = batches_of("sft", samples, engine, trainer) if kind == "sft" else _batches(kind, samples, engine, trainer)
    losses = [engine.step(batches, _objective(kind)).loss for _ in range(steps)]
    masters = {str(part.values.dtype) for part in fragments(engine.engine)}
    engine.export(directory)
    engine.close()
    return {"losses": losses, "masters": masters}


def with_adapters(kind: str, model: str, dtype: str, in_4bit: bool) -> Any:
    from engine_parts import PAD, module_of

    from rlhf_core.config.training import LoraSettings
    from rlhf_core.models.lora import add_lora, nf4_config
    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.process_scorer import StepTokens, load_process_scorer
    from rlhf_core.training.engine import TORCH_DTYPE

    if kind == "prm":
        tokens = StepTokens(20, VERDICTS, "\n")
        module: Any = load_process_scorer(model, tokens=tokens, dtype=TORCH_DTYPE[dtype], attention="sdpa")
    elif in_4bit:
        quantization = nf4_config(TORCH_DTYPE[dtype])
        module = load_policy(model, dtype=TORCH_DTYPE[dtype], attention="sdpa", quantization=quantization)
    else:
        module = module_of(kind, model, dtype, PAD)
    add_lora(module.lm, LoraSettings(**LORA), "reward" if kind == "rm" else "causal", SEED)
    return module


def _batches(kind: str, samples: Sequence[Any], engine: Any, trainer: dict[str, Any]) -> list[Any]:
    from engine_parts import PAD, batches_of

    from rlhf_core.config.training import TrainerSettings
    from rlhf_core.data.layout import Layout, make_batch, plan_step

    if kind == "rm":
        return batches_of(kind, samples, engine, trainer)
    items = [_step_item(*sample) for sample in samples]
    settings = TrainerSettings(**trainer)
    layout = Layout(engine.mesh.data_ranks, settings.micro_batch_size, settings.packing, 40, 1)
    plan = plan_step([item.tokens for item in items], layout)[engine.mesh.data_rank]
    return [make_batch(items, micro, layout, PAD) for micro in plan]


def _step_item(ids: Sequence[int], start: int) -> Any:
    """A verdict at the first token of the response and at its last: the token's id modulo the verdicts."""
    import numpy as np

    from rlhf_core.data.samples import Item, Sample

    weights, labels = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    for place in {start, len(ids) - 1}:
        weights[place], labels[place] = 1, ids[place] % len(VERDICTS)
    return Item((Sample(np.array(ids, np.int32), weights, labels),))


def _objective(kind: str) -> Any:
    from engine_parts import objective_of

    from rlhf_core.config.supervised import PrmSettings
    from rlhf_core.config.training import OptimizerSettings
    from rlhf_core.training.objectives_process import PrmObjective

    if kind != "prm":
        return objective_of(kind)
    return PrmObjective(
        PrmSettings(
            optimizer=OptimizerSettings(lr=1.0),
            batch_size=8,
            max_len=64,
            max_steps=1,
            placeholder_token="p",
            reward_tokens=("a", "b", "c"),
        )
    )
