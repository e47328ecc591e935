"""Programs on the engine that ranks.py runs in trainer ranks. Torch and DeepSpeed are imported inside them alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_parts import (
    PAD,
    averages_of,
    batches_of,
    digest_of,
    engine_of,
    gather_files,
    objective_of,
    parameters_of,
)

GRADIENT_LR = 1e4


def train(
    rank: int,
    ranks: int,
    *,
    kind: str,
    model: str,
    samples: Sequence[Any],
    trainer: dict[str, Any],
    optimizer: dict[str, Any],
    steps: int = 1,
    dtype: str = "float32",
    total_steps: int = 100,
    frozen: Sequence[str] = (),
) -> dict[str, Any]:
    """Optimizer steps on the same samples. Parameters (of rank 0) and each step's figures."""
    from rlhf_core.training.engine import means
    from rlhf_core.training.evaluation import Evaluation

    with engine_of(kind, model, trainer, optimizer, dtype, total_steps=total_steps, frozen=frozen) as engine:
        objective, batches = objective_of(kind), batches_of(kind, samples, engine, trainer)
        results = [engine.step(batches, objective) for _ in range(steps)]
        parameters = parameters_of(engine)
        evaluation = Evaluation(engine, objective)
        evaluation.add(batches[:1])
        evaluation.add(batches[1:])
        evaluated = evaluation.result()
    return {
        "parameters": parameters if rank == 0 else {name: array.shape for name, array in parameters.items()},
        "loss": [r.loss for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "lr": [r.lr for r in results],
        "metrics": [means(r.metrics) for r in results],
        "evaluated": evaluated,
    }


def gradient(
    rank: int,
    ranks: int,
    *,
    kind: str,
    model: str,
    samples: Sequence[Any],
    trainer: dict[str, Any],
    dtype: str = "float32",
) -> dict[str, Any]:
    """The gradient of one step, read off AdamW's first update: with eps 1 that is -lr * g / (|g| + 1).

    The learning rate is so high that the weights before the step are lost in rounding, and the gradient is not.
    """
    import numpy as np

    optimizer = {
        "lr": GRADIENT_LR,
        "eps": 1.0,
        "schedule": "constant",
        "warmup_ratio": 0.0,
        "max_grad_norm": 1e9,
    }
    with engine_of(kind, model, trainer, optimizer, dtype) as engine:
        before = parameters_of(engine)
        result = engine.step(batches_of(kind, samples, engine, trainer), objective_of(kind))
        after = parameters_of(engine)
    gradients = {}
    for name, array in after.items():
        update = (before[name].astype(np.float64) - array) / GRADIENT_LR
        gradients[name] = update / (1 - np.abs(update))
    return {
        "gradients": gradients if rank == 0 else {},
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "metrics": result.metrics,
    }


def effects(
    rank: int,
    ranks: int,
    *,
    model: str,
    trainer: dict[str, Any],
    samples: Sequence[Any],
    dtype: str = "float32",
    kind: str = "sft",
) -> dict[str, Any]:
    """What DeepSpeed and the model do under `trainer`, seen from outside during one step."""
    with engine_of(kind, model, trainer, {"lr": 1e-2}, dtype) as engine:
        layer = engine.module.lm.model.layers[0]
        forwards: list[int] = []
        copies: list[bool] = []

        def seen(*_: Any) -> None:
            forwards.append(1)
            copies.append(any(getattr(p, "ds_secondary_tensor", None) is not None for p in engine.module.parameters()))

        layer.mlp.register_forward_pre_hook(seen)
        batches = batches_of(kind, samples, engine, trainer)
        engine.step(batches, objective_of(kind))
        zero = engine.engine.optimizer
        checkpointing = vars(layer).get("_gradient_checkpointing_func")
        return {
            "forwards": len(forwards) / len(batches),
            "reentrant": None if checkpointing is None else checkpointing.keywords["use_reentrant"],
            "offload": [engine.engine.zero_use_cpu_optimizer(), type(zero.optimizer).__name__],
            "overlap": engine.engine.zero_overlap_comm(),
            "second copy": any(copies),
            "gradients": str(engine.engine.get_data_types()[1]),
        }


def average(
    rank: int,
    ranks: int,
    *,
    model: str,
    trainer: dict[str, Any],
    samples: Sequence[Any],
    decay: float,
    steps: int,
    directory: str,
    lr: float = 1e-2,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Weights before and after each step and their moving average at the end; digests, with and without one."""
    optimizer = {"lr": lr, "warmup_ratio": 0.0, "schedule": "constant"}

    def run(**options: Any) -> dict[str, Any]:
        with engine_of("sft", model, trainer, optimizer, dtype, **options) as engine:
            batches, objective = batches_of("sft", samples, engine, trainer), objective_of("sft")
            weights = [parameters_of(engine)]
            for _ in range(steps):
                engine.step(batches, objective)
                weights.append(parameters_of(engine))
            done: dict[str, Any] = {"weights": weights}
            if options:
                engine.export(directory)
                shapes = {name: array.shape for name, array in weights[0].items()}
                done["average"] = averages_of(engine)
                done["fp32 average"] = {n: engine.ema.whole(n, Size(shape)).numpy() for n, shape in shapes.items()}
            engine.step(batches, objective)
            return {**done, "digests": digest_of(engine)}

    from torch import Size

    with_average = run(ema_decay=decay)
    return {**with_average, "digests without": run()["digests"]}


def look_at_average(
    rank: int, ranks: int, *, model: str, trainer: dict[str, Any], samples: Sequence[Any], dtype: str
) -> dict[str, Any]:
    """Digests of the weights before, under and after their moving average, of an engine that goes on and of one that
    never had one; and how many bytes this rank kept meanwhile, of how many in all."""
    from rlhf_core.training.engine import gathered
    from rlhf_core.training.evaluation import Evaluation
    from rlhf_core.training.kept_weights import KeptWeights

    optimizer = {"lr": 1e-2, "warmup_ratio": 0.0, "schedule": "constant"}
    done: dict[str, Any] = {}
    for decay in (None, 0.9):
        with engine_of("sft", model, trainer, optimizer, dtype, ema_decay=decay) as engine:
            batches, objective = batches_of("sft", samples, engine, trainer), objective_of("sft")
            engine.step(batches, objective)
            parameters = list(engine.module.parameters())
            for parameter in parameters:  # a zero whose sign a sum with zeros would lose
                with gathered([parameter], engine.zero_stage, modifier_rank=0):
                    parameter.detach().view(-1)[:1] = -0.0
            done["before"] = digest_of(engine)
            with engine.averaged_weights():
                done["under"] = digest_of(engine)
                Evaluation(engine, objective).add(batches)
            done["after"] = digest_of(engine)
            done["kept"] = sum(part.nbytes for part in KeptWeights(engine.engine, parameters).parts)
            done["all"] = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in parameters)
            result = engine.step(batches, objective)
            done[f"further {decay}"] = result.loss, result.grad_norm, digest_of(engine)
    return done


def resume(
    rank: int,
    ranks: int,
    *,
    model: str,
    trainer: dict[str, Any],
    dtype: str,
    samples: Sequence[Any],
    before: int,
    after: int,
    optimizer: dict[str, Any],
    directory: str,
) -> dict[str, Any]:
    """Steps in one go, and the same with new engines in between: digests of both, and where both saved at the end."""
    import torch
    import torch.distributed as dist

    from rlhf_core.training import process

    root = Path(directory)
    objective = objective_of("sft")

    def new_engine() -> Any:
        return engine_of("sft", model, trainer, optimizer, dtype, total_steps=before + after, ema_decay=0.9)

    def run(engine: Any, first: int, count: int) -> list[tuple[float, float]]:
        done = []
        for step in range(first, first + count):
            batches = batches_of("sft", samples[: 2 + step % len(samples)], engine, trainer)
            result = engine.step(batches, objective)
            done.append((result.loss, result.lr))
        return done

    def saved(engine: Any, name: str) -> Path:
        """Each rank to a directory of its own, then all files together, as through the store."""
        own = root / f"{name}-{rank}"
        own.mkdir(parents=True)
        engine.save(own / "model")
        process.save_rng(own, rank)
        return gather_files(own, root / name)

    torch.manual_seed(11 + rank)
    with new_engine() as engine:
        straight = run(engine, 0, before + after)
        straight_digest, _ = digest_of(engine), saved(engine, "straight")

    torch.manual_seed(11 + rank)
    with new_engine() as engine:
        first = run(engine, 0, before)
        checkpoint = saved(engine, "checkpoint")

    torch.manual_seed(99)  # a new process would have drawn otherwise
    with new_engine() as engine:
        engine.load(checkpoint / "model")
        process.load_rng(checkpoint, rank)
        second = run(engine, before, after)
        resumed_digest, _ = digest_of(engine), saved(engine, "resumed")
    dist.barrier()
    return {
        "straight": straight,
        "resumed": first + second,
        "straight_digest": straight_digest,
        "resumed_digest": resumed_digest,
    }


def save_and_go_on(
    rank: int,
    ranks: int,
    *,
    model: str,
    trainer: dict[str, Any],
    dtype: str,
    samples: Sequence[Any],
    optimizer: dict[str, Any],
    directory: str,
    load_from: str | None = None,
    steps: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Loads where told to, trains two steps of the first half of the samples, saves, and does `steps` of the second."""
    half = len(samples) // 2
    root = Path(directory)
    with engine_of("sft", model, trainer, optimizer, dtype, total_steps=8, **options) as engine:
        objective = objective_of("sft")
        first, second = (batches_of("sft", part, engine, trainer) for part in (samples[:half], samples[half:]))
        if load_from is not None:
            engine.load(Path(load_from))
        else:
            for _ in range(2):
                engine.step(first, objective)
            engine.save(root / f"own-{rank}" / "model")
            gather_files(root / f"own-{rank}", root / "checkpoint")
        loaded = parameters_of(engine)
        averages = averages_of(engine)
        results = [engine.step(second, objective) for _ in range(steps)]
        return {
            "loaded": loaded,
            "averages": averages,
            "parameters": parameters_of(engine),
            "losses": [r.loss for r in results],
            "lrs": [r.lr for r in results],
        }


def gathered(rank: int, ranks: int, *, kind: str, model: str, trainer: dict[str, Any], bucket: int) -> dict[str, Any]:
    """`full_parameters` with small buckets, before any step."""
    with engine_of(kind, model, trainer, {"lr": 1e-3}) as engine:
        return {name: tensor.numpy() for name, tensor in engine.full_parameters(bucket)}


def export(
    rank: int,
    ranks: int,
    *,
    kind: str,
    model: str,
    trainer: dict[str, Any],
    samples: Any,
    directory: str,
    pad: int = PAD,
) -> Any:
    """One step, then the export; what the trained module gives for `samples`, rows of token ids padded each way."""
    import torch

    def scores(rows: list[Any], side: str) -> list[float]:
        """Of the last token of each row."""
        width = max(map(len, rows))
        starts = [0 if side == "right" else width - len(ids) for ids in rows]
        ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
        for n, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[n, start : start + len(row)] = torch.as_tensor(row)
            mask[n, start : start + len(row)] = 1
        given = engine.infer(input_ids=ids, attention_mask=mask)
        return [given[n, start + len(row) - 1].item() for n, (row, start) in enumerate(zip(rows, starts, strict=True))]

    with engine_of(kind, model, trainer, {"lr": 1e-2, "warmup_ratio": 0.0}, pad=pad) as engine:
        engine.step(batches_of(kind, samples, engine, trainer, pad=pad), objective_of(kind))
        engine.export(directory)
        if kind != "rm":
            return None
        rows = [ids for pair in samples for ids, _ in pair]
        return {
            "alone": [score for ids in rows for score in scores([ids], "right")],
            "right": scores(rows, "right"),
            "left": scores(rows, "left"),
        }


def all_masked(rank: int, ranks: int, *, model: str, zero_stage: int, samples: Sequence[Any]) -> dict[str, Any]:
    """A step without a response token on any rank, then one where rank 1 alone has none, then an ordinary one."""
    import math

    trainer = {"zero_stage": zero_stage, "ranks": ranks}
    objective = objective_of("sft")
    with engine_of("sft", model, trainer, {"lr": 1e-2}) as engine:
        ordinary = batches_of("sft", samples, engine, trainer)
        empty = [{**batch, "weights": batch["weights"] * 0} for batch in ordinary]
        message = ""
        try:
            engine.step(empty, objective)
        except ValueError as error:
            message = str(error)
        partly = engine.step(ordinary if rank == 0 else empty, objective)
        after = engine.step(ordinary, objective)
    return {"message": message, "losses": [partly.loss, after.loss], "finite": math.isfinite(after.grad_norm)}


def not_finite(rank: int, ranks: int, *, model: str, samples: Sequence[Any]) -> str:
    """An ordinary step, then one whose loss is NaN on rank 1 alone."""
    import torch

    from rlhf_core.training.objectives_sft import SftObjective

    class Broken(SftObjective):
        def loss(self, batch: Any, outputs: Any) -> Any:
            return super().loss(batch, outputs * (torch.nan if rank == 1 else 1.0))

    trainer = {"ranks": ranks}
    with engine_of("sft", model, trainer, {"lr": 1e-2}) as engine:
        batches = batches_of("sft", samples, engine, trainer)
        engine.step(batches, SftObjective())
        try:
            engine.step(batches, Broken())
        except ValueError as error:
            return str(error)
    return ""


def lr_factors(rank: int, ranks: int, *, settings: dict[str, Any], total_steps: int) -> list[float]:
    from rlhf_core.config.training import OptimizerSettings
    from rlhf_core.training.ds_config import lr_factor

    factor = lr_factor(OptimizerSettings(lr=1.0, **settings), total_steps)
    return [factor(step) for step in range(total_steps + 1)]
