"""One model under DeepSpeed: optimizer steps over micro-batches, parameters gathered by name, saving and loading."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from rlhf_core.config.training import Dtype, OptimizerSettings, TrainerSettings
from rlhf_core.models.export import BaseName, export_model, is_quantised
from rlhf_core.models.isolation import check_isolation
from rlhf_core.models.lora import adapter_state, is_adapter, merged_state
from rlhf_core.store.keys import directory_digest
from rlhf_core.training.capabilities import check_heads
from rlhf_core.training.ds_config import ds_config, lr_factor
from rlhf_core.training.ema import Ema
from rlhf_core.training.kept_weights import KeptWeights
from rlhf_core.training.mesh import mesh_of, zero_stage
from rlhf_core.training.objective import Batch, LossParts, Objective
from rlhf_core.training.parameters import bare_name, freeze, muon, parameter_groups
from rlhf_core.training.process import accelerator
from rlhf_core.training.sequence_parallel import SequenceShards
from rlhf_core.training.tensor_parallel import tensor_parallel_config, whole_tensor
from rlhf_core.training.universal import ENGINE_DIRECTORY, is_universal

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_initialize: Any = deepspeed.initialize  # its annotations leave out parameter groups and torch's schedulers


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, over all ranks and micro-batches; metrics are (sum, count) pairs, see `means`."""

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, tuple[float, float]]


class TrainEngine:
    """A module, its optimizer and its schedule under DeepSpeed, ZeRO 0 to 3. Every rank makes the same calls."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        dtype: Dtype,
        trainer: TrainerSettings,
        optimizer: OptimizerSettings | None,
        total_steps: int = 0,
        frozen: Sequence[str] = (),
        ema_decay: float | None = None,
    ):
        """`build` loads the module; under ZeRO-3 its weights are partitioned as they are read.

        Without `optimizer` the module is frozen; with it, those parameters that an expression in `frozen` finds.
        """
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        if self.ranks != trainer.ranks:
            raise ValueError(f"trainer.ranks is {trainer.ranks} in a process group of {self.ranks}")
        config = ds_config(dtype, trainer, optimizer)
        self.zero_stage = zero_stage(dtype, trainer, trained=optimizer is not None)
        # transformers holds it weakly and looks at it while weights are loaded: alive until the module is built.
        zero3_config = HfDeepSpeedConfig(config) if self.zero_stage == 3 else None
        if trainer.zpg > 1:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed refuses to make it for a second model
        module: Any = build()
        del zero3_config
        self.mesh = mesh_of(trainer, self.rank)
        self.trained = optimizer is not None
        self.ema: Ema | None = None
        # float32 without ZeRO: DeepSpeed steps torch's AdamW itself, and keeps no gradient norm.
        self._unwrapped = self.zero_stage == 0
        check_heads(trainer, module.lm.config)
        self._shards: SequenceShards | None = None
        if self.mesh.sequence > 1:
            self._shards = SequenceShards(module, self.mesh.sequence, trainer.attention)
        if self.mesh.tensor > 1:
            config["tensor_parallel"] = tensor_parallel_config(module.lm, self.mesh.tensor)
        if optimizer is None:
            module.requires_grad_(False)
            module.eval()
            self.engine, self.module = self._frozen(module, config)
            self._check_packing(dtype, trainer)
            return
        freeze(module, frozen)
        if trainer.liger:
            _use_liger(module.lm)
        if trainer.activation_checkpointing:
            _recompute_activations(module.lm, reentrant=trainer.activation_checkpointing_reentrant)
        self.engine, *_ = _initialize(
            model=module,
            model_parameters=parameter_groups(module, optimizer),
            optimizer=muon if optimizer.name == "muon" else None,
            config=config,
            mpu=None if self._shards is None else self._shards.groups,
            lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lr_factor(optimizer, total_steps)),
            dist_init_required=False,
        )
        if trainer.deepcompile:
            self.engine.compile()
        self.module = self.engine.module
        self.device = self.engine.device
        # What DeepSpeed divides the sum of all ranks' gradients by. ZeRO-3 takes the ranks of a sequence for others'.
        self._averaged_over = self.mesh.data_ranks * (self.mesh.sequence if self.zero_stage == 3 else 1)
        parts = self.engine.optimizer.param_groups
        self._adamw = next((i for i, part in enumerate(parts) if not part.get("use_muon")), 0)
        self._tensor_rank = self.rank % self.mesh.tensor
        if ema_decay is not None:
            self.ema = Ema(self.engine, ema_decay)
        self._check_packing(dtype, trainer)

    def _check_packing(self, dtype: Dtype, trainer: TrainerSettings) -> None:
        if trainer.packing:
            config = self.module.lm.config
            check_isolation(self.infer, config, float32=dtype == "float32", multiple=self.mesh.sequence)

    def close(self) -> None:
        """Ends DeepSpeed's engine; its memory is free once this object is gone."""
        if self.trained or self.zero_stage == 3:
            self.engine.destroy()
        groups.mpu = None  # DeepSpeed's own, which the next engine of this process would take for its mesh

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
        divided by them and multiplied by the number of ranks that DeepSpeed averages gradients over.

        Raises ValueError on every rank when the loss, the gradient's norm or a metric is not finite.
        """
        self.engine.train()
        batches = [self.moved(batch) for batch in micro_batches]
        totals = self._denominators(batches, objective)
        lr = self.engine.get_lr()[self._adamw]  # before the step, which moves the schedule on
        skipped = self.engine.skipped_steps
        sums: dict[str, float] = {}
        norm: Any = math.nan
        for number, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            parts = objective.loss(batch, self._forward(**objective.forward_inputs(batch)))
            loss = _weighted(parts, totals)
            self.engine.backward(loss * self._averaged_over, scale_wrt_gas=False)
            if self._unwrapped and number == len(batches) - 1:
                norm = nn.utils.get_total_norm(p.grad for p in self.module.parameters() if p.grad is not None)
            self.engine.step()
            _add_metrics(sums, loss, parts)
        if self.ema is not None:
            self.ema.update()
        loss_sum, metrics = self._summed(sums)
        norm = float(norm if self._unwrapped else self.engine.get_global_grad_norm())
        checked = {"loss": loss_sum, "grad_norm": norm, **{name: total for name, (total, _) in metrics.items()}}
        if self.engine.fp16_enabled() and self.engine.skipped_steps > skipped:
            del checked["grad_norm"]  # of scaled gradients that overflowed: DeepSpeed skips the step, lowers the scale
        self._check_finite(checked)
        return StepResult(loss=loss_sum, grad_norm=norm, lr=lr, metrics=metrics)

    def _check_finite(self, values: dict[str, float]) -> None:
        wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(
                f"optimizer step {self.engine.global_steps}: {', '.join(wrong)}; lower the learning rate, or look for "
                "what is wrong with the data or the model that training starts from"
            )

    @torch.no_grad()
    def infer(self, **inputs: Any) -> Tensor:
        """The module's forward in eval mode."""
        self.engine.eval()
        moved = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return self._forward(**moved)

    def moved(self, batch: Batch) -> Batch:
        """The micro-batch on this rank's device."""
        return {name: value.to(self.device) for name, value in batch.items()}

    def _forward(self, **inputs: Any) -> Any:
        return self.engine(**inputs) if self._shards is None else self._shards(self.engine, **inputs)

    def _denominators(self, batches: list[Batch], objective: Objective) -> dict[str, float]:
        local: dict[str, float] = {}
        for batch in batches:
            for name, value in objective.denominators(batch).items():
                local[name] = local.get(name, 0.0) + value
        totals = self.all_reduce(local)
        empty = [name for name, value in totals.items() if value <= 0]
        if empty:
            raise ValueError(f"this optimizer step has nothing to average for {', '.join(empty)}: every row is masked")
        return totals

    def _summed(self, sums: dict[str, float]) -> tuple[float, dict[str, tuple[float, float]]]:
        """The loss, and (sum, count) of each metric, over all ranks, of what `_add_metrics` added up on this one."""
        summed = self.all_reduce(sums)
        names = [key.removesuffix(" sum") for key in summed if key.endswith(" sum")]
        return summed["loss"], {name: (summed[f"{name} sum"], summed[f"{name} count"]) for name in names}

    def all_reduce(self, local: dict[str, float]) -> dict[str, float]:
        """Sums by name over data-parallel ranks, in float64; every rank has the same names."""
        names = sorted(local)
        values = torch.tensor([local[name] for name in names], dtype=torch.float64, device=self.device)
        values *= self.rank % self.mesh.peers == 0  # peers that share samples count them once
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    # -- parameters ---------------------------------------------------------------------------------------------

    def full_parameters(
        self, bucket_elements: int = 50_000_000, *, averaged: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in the Hugging Face model, whole tensor on the CPU) of each parameter, tied ones once.

        Adapters are merged into their layers. Under ZeRO-3 parameters are gathered bucket by bucket: every rank has to
        iterate to the end; tensors are whole on each rank while they are yielded. `averaged`: the moving average of
        those that are trained.
        """
        yield from merged_state(self.module.lm, self._whole_parameters(bucket_elements, averaged=averaged))

    def _whole_parameters(
        self,
        bucket_elements: int = 50_000_000,
        *,
        averaged: bool,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> Iterator[tuple[str, Tensor]]:
        """The same under their own names, those of adapters apart."""
        bucket: list[tuple[str, Tensor]] = []
        elements = 0
        for name, parameter in self.module.named_parameters():
            if not wanted(name):
                continue
            bucket.append((bare_name(name), parameter))
            elements += getattr(parameter, "ds_numel", parameter.numel())
            if elements >= bucket_elements:
                yield from self._gathered(bucket, averaged)
                bucket, elements = [], 0
        yield from self._gathered(bucket, averaged)

    def _gathered(self, bucket: list[tuple[str, Tensor]], averaged: bool) -> Iterator[tuple[str, Tensor]]:
        with gathered([parameter for _, parameter in bucket], self.zero_stage):
            for name, parameter in bucket:
                part = parameter.detach()
                if averaged and self.ema is not None and parameter.requires_grad:
                    part = self.ema.whole(name, part.shape).to(part.dtype)
                yield name, whole_tensor(parameter, part).cpu()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Forward passes see the moving average, of an engine with `ema_decay`; afterwards the weights' own bits.

        Meanwhile the ranks' host memories hold the weights once more, together.
        """
        if self.ema is None:
            yield
            return
        trained = [(bare_name(name), p) for name, p in self.module.named_parameters() if p.requires_grad]
        before = KeptWeights(self.engine, [parameter for _, parameter in trained])
        for name, parameter in trained:
            with torch.no_grad(), gathered([parameter], self.zero_stage, modifier_rank=0):
                parameter.copy_(self.ema.whole(name, parameter.shape))
        try:
            yield
        finally:
            before.restore()

    def export(self, directory: str | Path, base_name: BaseName | None = None) -> None:
        """The whole model in Hugging Face layout and its adapter, written by rank 0. Every rank calls this.

        Of an engine with `ema_decay` their moving average. Training goes on from the same bits afterwards.
        base_name: what an adapter's base is called; None: by the path that it was loaded from.
        """
        lm = self.module.lm
        adapter = adapter_state(self._whole_parameters(averaged=True, wanted=is_adapter))
        whole = () if is_quantised(lm) else self.full_parameters(averaged=True)
        state = {name: tensor for name, tensor in whole if self.rank == 0}
        if self.rank == 0:
            base_digest = directory_digest(lm.name_or_path) if adapter else None
            export_model(lm, Path(directory), state, adapter, base_digest, base_name)
        dist.barrier()

    # -- training checkpoints -----------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """This rank's shards, at a step boundary. Every rank calls this, each with a directory of its own."""
        self.engine.save_checkpoint(str(directory), tag=ENGINE_DIRECTORY, save_latest=False)
        if self.ema is not None:
            self.ema.save(Path(directory), self._tensor_rank, self.rank)

    def load(self, directory: str | Path) -> None:
        """What `save` wrote, of all ranks; of another layout, once universal.py has converted it."""
        universal = is_universal(Path(directory))
        self.engine._config.load_universal_checkpoint = universal
        decays = [group["weight_decay"] for group in self.engine.optimizer.param_groups]
        with tempfile.TemporaryDirectory() as temp:  # DeepSpeed takes the path for a pattern: it gets a plain one
            plain = Path(temp) / "checkpoint"
            plain.symlink_to(Path(directory).resolve())
            loaded, _ = self.engine.load_checkpoint(str(plain), tag=ENGINE_DIRECTORY)
        if loaded is None:
            raise FileNotFoundError(f"{directory} holds no DeepSpeed checkpoint for {self.ranks} ranks")
        if universal and self.zero_stage == 3:
            _separate_groups(self.engine.optimizer, decays)
        if self.ema is not None:
            self.ema.load(Path(directory), self._tensor_rank)


def _separate_groups(optimizer: Any, weight_decays: list[float]) -> None:
    """What ZeRO-3's loading of a universal checkpoint gets wrong: all groups have the settings of the first, and one
    tensor between them as AdamW's step, which then counts each group's update.
    """
    for group, decay in zip(optimizer.param_groups, weight_decays, strict=True):
        group["weight_decay"] = decay
    for state in optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()


def _weighted(parts: LossParts, totals: dict[str, float]) -> Tensor:
    """This micro-batch's share of the optimizer step's loss."""
    return torch.stack([(term.weight / totals[name]) * term.numerator for name, term in parts.terms.items()]).sum()


def gathered(parameters: list[Any], zero_stage: int, modifier_rank: int | None = None) -> Any:
    """Context in which ZeRO-3 parameters are whole on every rank; changes of `modifier_rank` are kept."""
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank, enabled=zero_stage == 3)


def _use_liger(lm: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    _apply_liger_kernel_to_instance(model=lm)


def _recompute_activations(lm: Any, *, reentrant: bool) -> None:
    lm.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        # It gives a layer a gradient only if an input asks for one, which frozen embeddings do not.
        lm.enable_input_require_grads()


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
