"""One model under DeepSpeed: optimizer steps over micro-batches, parameters gathered by name, saving and loading."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from rlhf_core.config.training import Dtype, OptimizerSettings, TrainerSettings
from rlhf_core.training.objective import Batch, LossParts, Objective
from rlhf_core.training.process import accelerator

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_initialize: Any = deepspeed.initialize  # its annotations leave out parameter groups and torch's schedulers
_TAG = "engine"  # DeepSpeed's name for the one checkpoint below a directory


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, over all ranks and micro-batches; metrics are (sum, count) pairs, see `means`."""

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, tuple[float, float]]


def ds_config(dtype: Dtype, trainer: TrainerSettings, optimizer: OptimizerSettings | None) -> dict[str, Any]:
    """DeepSpeed's configuration. Gradient accumulation is 1: the engine below sets the boundaries itself.

    A bfloat16 model in training with zero_stage 0 gets stage 1: DeepSpeed has no float32 master weights with float32
    accumulation below it.
    """
    trained_in_bf16 = optimizer is not None and dtype == "bfloat16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": max(1, trainer.zero_stage) if trained_in_bf16 else trainer.zero_stage},
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if trainer.zero_stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    if optimizer is None:
        return config
    if trained_in_bf16:
        # Gradients of many micro-batches add up in float32: in bfloat16 small ones would be swallowed.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if trainer.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config["gradient_clipping"] = optimizer.max_grad_norm
    adam: dict[str, Any] = {"lr": optimizer.lr, "betas": list(optimizer.betas), "eps": optimizer.eps}
    adam["weight_decay"] = optimizer.weight_decay
    if accelerator().device_name() == "cpu":
        adam["torch_adam"] = True  # the fused Adam is a CUDA kernel
    config["optimizer"] = {"type": "AdamW", "params": adam}
    return config


def lr_factor(settings: OptimizerSettings, total_steps: int) -> Callable[[int], float]:
    """Step -> share of the peak learning rate: linear warm-up, then constant, cosine or linear down to the floor."""
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    floor = settings.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        falling = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return floor + (1 - floor) * falling

    return factor


class TrainEngine:
    """A module, its AdamW and its schedule under DeepSpeed, ZeRO 0 to 3. Every rank makes the same calls."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        dtype: Dtype,
        trainer: TrainerSettings,
        optimizer: OptimizerSettings | None,
        total_steps: int = 0,
    ):
        """`build` loads the module; under ZeRO-3 its weights are partitioned as they are read.

        Without `optimizer` the module is frozen.
        """
        config = ds_config(dtype, trainer, optimizer)
        # transformers holds it weakly and looks at it while weights are loaded: alive until the module is built.
        zero3_config = HfDeepSpeedConfig(config) if trainer.zero_stage == 3 else None
        module: Any = build()
        del zero3_config
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.trained = optimizer is not None
        self.zero_stage = trainer.zero_stage
        # float32 without ZeRO: DeepSpeed steps torch's AdamW itself, and keeps no gradient norm.
        self._unwrapped = trainer.zero_stage == 0 and dtype == "float32"
        if optimizer is None:
            module.requires_grad_(False)
            module.eval()
            self.engine, self.module = self._frozen(module, config)
            return
        if trainer.activation_checkpointing:
            module.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.engine, *_ = _initialize(
            model=module,
            model_parameters=_parameter_groups(module, optimizer.weight_decay),
            config=config,
            lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lr_factor(optimizer, total_steps)),
            dist_init_required=False,
        )
        self.module = self.engine.module
        self.device = self.engine.device

    def _frozen(self, module: Any, config: dict[str, Any]) -> tuple[Any, Any]:
        self.device = torch.device(accelerator().current_device_name())
        if self.zero_stage == 3:
            engine, *_ = _initialize(model=module, config=config, dist_init_required=False)
            return engine, engine.module
        return module.to(self.device), module

    # -- training -----------------------------------------------------------------------------------------------

    def step(self, micro_batches: list[Batch], objective: Objective) -> StepResult:
        """One optimizer step. Neither its gradient nor its loss depends on how the samples were cut.

        Denominators are summed over all micro-batches and ranks before the first backward; each micro-batch's loss is
        divided by them and multiplied by the number of ranks, since DeepSpeed averages gradients over ranks.

        Raises ValueError on every rank when the loss, the gradient's norm or a metric is not finite.
        """
        self.engine.train()
        batches = [{name: value.to(self.device) for name, value in batch.items()} for batch in micro_batches]
        totals = self._denominators(batches, objective)
        lr = self.engine.get_lr()[0]  # before the step, which moves the schedule on
        sums: dict[str, float] = {}
        norm: Any = math.nan
        for number, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            parts = objective.loss(batch, self.engine(**objective.forward_inputs(batch)))
            loss = _weighted(parts, totals)
            self.engine.backward(loss * self.ranks, scale_wrt_gas=False)
            if self._unwrapped and number == len(batches) - 1:
                norm = nn.utils.get_total_norm(p.grad for p in self.module.parameters() if p.grad is not None)
            self.engine.step()
            _add_metrics(sums, loss, parts)
        loss_sum, metrics = self._summed(sums)
        norm = float(norm if self._unwrapped else self.engine.get_global_grad_norm())
        self._check_finite(
            {"loss": loss_sum, "grad_norm": norm, **{name: total for name, (total, _) in metrics.items()}}
        )
        return StepResult(loss=loss_sum, grad_norm=norm, lr=lr, metrics=metrics)

    def _check_finite(self, values: dict[str, float]) -> None:
        wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(
                f"optimizer step {self.engine.global_steps}: {', '.join(wrong)}; lower the learning rate, or look for "
                "what is wrong with the data or the model that training starts from"
            )

    def evaluate(self, micro_batches: list[Batch], objective: Objective) -> dict[str, float]:
        """Means of the objective's metrics and its loss, over all ranks, without a gradient.

        Ranks may hold different numbers of rows, but must make the same number of micro-batches.
        """
        batches = [{name: value.to(self.device) for name, value in batch.items()} for batch in micro_batches]
        totals = self._denominators(batches, objective)
        sums: dict[str, float] = {}
        for batch in batches:
            outputs = self.infer(**objective.forward_inputs(batch))
            parts = objective.loss(batch, outputs)
            loss = _weighted(parts, totals)
            _add_metrics(sums, loss, parts)
        loss_sum, metrics = self._summed(sums)
        return {"loss": loss_sum, **means(metrics)}

    @torch.no_grad()
    def infer(self, **inputs: Any) -> Tensor:
        """The module's forward in eval mode."""
        self.engine.eval()
        moved = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return self.engine(**moved)

    def _denominators(self, batches: list[Batch], objective: Objective) -> dict[str, float]:
        local: dict[str, float] = {}
        for batch in batches:
            for name, value in objective.denominators(batch).items():
                local[name] = local.get(name, 0.0) + value
        totals = self._all_reduce(local)
        empty = [name for name, value in totals.items() if value <= 0]
        if empty:
            raise ValueError(f"this optimizer step has nothing to average for {', '.join(empty)}: every row is masked")
        return totals

    def _summed(self, sums: dict[str, float]) -> tuple[float, dict[str, tuple[float, float]]]:
        """The loss, and (sum, count) of each metric, over all ranks, of what `_add_metrics` added up on this one."""
        summed = self._all_reduce(sums)
        names = [key.removesuffix(" sum") for key in summed if key.endswith(" sum")]
        return summed["loss"], {name: (summed[f"{name} sum"], summed[f"{name} count"]) for name in names}

    def _all_reduce(self, local: dict[str, float]) -> dict[str, float]:
        """Sums by name over all ranks, in float64; every rank has the same names."""
        names = sorted(local)
        values = torch.tensor([local[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    # -- parameters ---------------------------------------------------------------------------------------------

    def full_parameters(self, bucket_elements: int = 50_000_000) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face model, whole tensor on the CPU) of each parameter, tied ones once.

        Under ZeRO-3 parameters are gathered bucket by bucket: every rank has to iterate to the end; tensors are
        whole on each rank while they are yielded.
        """
        bucket: list[tuple[str, Tensor]] = []
        elements = 0
        for name, parameter in self.module.named_parameters():
            bucket.append((name.removeprefix("lm."), parameter))
            elements += getattr(parameter, "ds_numel", parameter.numel())
            if elements >= bucket_elements:
                yield from self._gathered(bucket)
                bucket, elements = [], 0
        yield from self._gathered(bucket)

    def _gathered(self, bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        with gathered([parameter for _, parameter in bucket], self.zero_stage):
            for name, parameter in bucket:
                yield name, parameter.detach().cpu().clone()

    def export(self, directory: str | Path) -> None:
        """The model in Hugging Face layout, written by rank 0. Every rank calls this."""
        state = {name: tensor for name, tensor in self.full_parameters() if self.rank == 0}
        if self.rank == 0:
            self.module.lm.save_pretrained(directory, state_dict=state)
        dist.barrier()

    # -- training checkpoints -----------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """This rank's shards, at a step boundary. Every rank calls this, each with a directory of its own."""
        self.engine.save_checkpoint(str(directory), tag=_TAG, save_latest=False)

    def load(self, directory: str | Path) -> None:
        """What `save` wrote, of all ranks, with as many ranks and the same ZeRO stage."""
        loaded, _ = self.engine.load_checkpoint(str(directory), tag=_TAG)
        if loaded is None:
            raise FileNotFoundError(f"{directory} holds no DeepSpeed checkpoint for {self.ranks} ranks")


def _weighted(parts: LossParts, totals: dict[str, float]) -> Tensor:
    """This micro-batch's share of the optimizer step's loss."""
    return torch.stack([(term.weight / totals[name]) * term.numerator for name, term in parts.terms.items()]).sum()


def gathered(parameters: list[Any], zero_stage: int, modifier_rank: int | None = None) -> Any:
    """Context in which ZeRO-3 parameters are whole on every rank; changes of `modifier_rank` are kept."""
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank, enabled=zero_stage == 3)


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Biases and norms (one dimension) are not decayed. `ds_shape` is the whole shape under ZeRO-3."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) > 1].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": members, "weight_decay": decays[matrix]} for matrix, members in groups.items() if members]


def means(*metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Mean of each metric over all given steps: sum of the sums over sum of the counts; without a count it is left out.

    So a step of many tokens weighs more than one of few.
    """
    totals: dict[str, tuple[float, float]] = {}
    for one in metrics:
        for name, (total, count) in one.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + count
    return {name: total / count for name, (total, count) in totals.items() if count > 0}


def _add_metrics(sums: dict[str, float], loss: Tensor, parts: LossParts) -> None:
    sums["loss"] = sums.get("loss", 0.0) + loss.detach().item()
    for name, pair in parts.metrics.items():
        for part, value in zip(("sum", "count"), pair, strict=True):
            sums[f"{name} {part}"] = sums.get(f"{name} {part}", 0.0) + float(value)
