"""What the programs of engine_programs.py share: an engine of a kind of training, its micro-batches, its parameters."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PAD = 0
# Kinds that are trained on trajectories, with the algorithm of those with a policy.
RL_ALGORITHMS: dict[str, dict[str, Any]] = {
    "policy": {},
    "value": {},
    "ptx": {},
    "gspo": {
        "loss": "gspo",
        "aggregation": "sequence_mean",
        "entropy_coef": 0.3,
        "kl": {"coef": 0.2, "estimator": "k3", "place": "loss"},
    },
}
PTX_COEF = 0.5


class engine_of:
    """A TrainEngine of one of the objectives, which ends with the block."""

    def __init__(
        self,
        kind: str,
        model: str,
        trainer: dict[str, Any],
        optimizer: dict[str, Any],
        dtype: str = "float32",
        *,
        total_steps: int = 10,
        pad: int = PAD,
        lora: bool = False,
        **options: Any,
    ):
        from lora_programs import with_adapters

        from rlhf_core.config.training import OptimizerSettings, TrainerSettings
        from rlhf_core.training.engine import TrainEngine

        def build() -> Any:
            if lora:
                return with_adapters(kind, model, dtype, in_4bit=False)
            return module_of(kind, model, dtype, pad, trainer.get("attention", "sdpa"))

        self._engine: Any = TrainEngine(
            build,
            dtype=dtype,  # type: ignore[arg-type]
            trainer=TrainerSettings(**trainer),
            optimizer=OptimizerSettings(**optimizer),
            total_steps=total_steps,
            **options,
        )

    def __enter__(self) -> Any:
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def module_of(kind: str, model: str, dtype: str, pad: int, attention: str = "sdpa") -> Any:
    """flash_attention_2: by flash_kernel.py, in this process from now on."""
    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.scorer import load_scorer
    from rlhf_core.training.engine import TORCH_DTYPE

    if kind in ("rm", "value"):
        module: Any = load_scorer(model, dtype=TORCH_DTYPE[dtype], attention="sdpa", pad_token_id=pad)
    else:
        module = load_policy(model, dtype=TORCH_DTYPE[dtype], attention="sdpa")
    if attention == "flash_attention_2":
        from flash_kernel import install

        install(module.lm)
    return module


def objective_of(kind: str) -> Any:
    from rlhf_core.config.rl import AlgorithmSettings
    from rlhf_core.config.supervised import RmSettings
    from rlhf_core.config.training import OptimizerSettings
    from rlhf_core.training.objectives_reward import RmObjective
    from rlhf_core.training.objectives_sft import SftObjective
    from rlhf_core.training.rl_objectives import PolicyObjective, PtxObjective, ValueObjective

    base: dict[str, Any] = {"optimizer": OptimizerSettings(lr=1.0), "batch_size": 8, "max_len": 64, "max_steps": 1}
    made: dict[str, Callable[[], Any]] = {
        "sft": SftObjective,
        "rm": lambda: RmObjective(RmSettings(**base)),
        "value": lambda: ValueObjective(AlgorithmSettings()),
    }
    if kind in RL_ALGORITHMS and kind not in made:
        algorithm = AlgorithmSettings(**RL_ALGORITHMS[kind])
        policy = PolicyObjective(algorithm, temperature=0.7, kl_coef=algorithm.kl.coef, max_new_tokens=16)
        return PtxObjective(policy, PTX_COEF) if kind == "ptx" else policy
    return made[kind]()


def batches_of(kind: str, samples: Sequence[Any], engine: Any, trainer: dict[str, Any], *, pad: int = PAD) -> list[Any]:
    """This rank's micro-batches of `samples`, the items of one optimizer step; of ptx (trajectories, rows)."""
    from rlhf_core.config.training import TrainerSettings
    from rlhf_core.data.layout import Layout, make_batch, plan_step
    from rlhf_core.training.rl_batches import ptx_batches

    settings, mesh = TrainerSettings(**trainer), engine.mesh
    if kind in RL_ALGORITHMS:
        layout = Layout(mesh.data_ranks, settings.micro_batch_size, settings.packing, 40, mesh.sequence)
        trajectories, rows = samples if kind == "ptx" else (samples, ())
        batches = _rl_batches(trajectories, layout, mesh.data_rank, pad)
        return [*batches, *(ptx_batches([_sft_item(row) for row in rows], layout, mesh.data_rank, pad) if rows else ())]
    items = [ITEM[kind](sample) for sample in samples]
    capacity = max(40, *(item.tokens for item in items))
    layout = Layout(mesh.data_ranks, settings.micro_batch_size, settings.packing, capacity, mesh.sequence)
    plan = plan_step([item.tokens for item in items], layout)[mesh.data_rank]
    return [make_batch(items, micro, layout, pad) for micro in plan]


def _sample(ids: Sequence[int], start: int) -> Any:
    """Every token from `start` on is trained on."""
    import numpy as np

    from rlhf_core.data.samples import Sample

    weights = np.zeros(len(ids), dtype=np.float32)
    weights[start:] = 1
    return Sample(np.array(ids, dtype=np.int32), weights)


def _sft_item(exchange: Any) -> Any:
    from rlhf_core.data.samples import Item

    return Item((_sample(*exchange),))


def _rm_item(pair: Any) -> Any:
    from rlhf_core.data.samples import Item

    return Item(tuple(_sample(*exchange) for exchange in pair))


ITEM: dict[str, Callable[[Any], Any]] = {"sft": _sft_item, "rm": _rm_item}


def _rl_batches(samples: Sequence[dict[str, Any]], layout: Any, rank: int, pad: int) -> list[Any]:
    import numpy as np

    from rlhf_core.training.experience import Experience, Scored, padded
    from rlhf_core.training.rl_batches import experience_batches

    names = ("prompt_ids", "response_ids", "action_mask", "logprobs", "values")
    scored = [
        Scored(
            **{name: s[name] for name in names},
            sampler_logprobs=s["logprobs"],
            entropy=np.zeros_like(s["logprobs"]),
            ref_logprobs=s["logprobs"][::-1].copy(),
        )
        for s in samples
    ]
    advantages, returns, weights = (padded([s[n] for s in samples]) for n in ("advantages", "returns", "action_mask"))
    experience = Experience(scored, advantages, returns, weights)
    return experience_batches(experience, range(len(samples)), layout, rank, pad)


def gather_files(own: Path, together: Path) -> Path:
    """Every rank's files in one directory, as the store has them. Raises if two ranks wrote one name."""
    import torch.distributed as dist

    dist.barrier()
    for path in sorted(own.rglob("*")):
        if path.is_file():
            target = together / path.relative_to(own)
            target.parent.mkdir(parents=True, exist_ok=True)
            assert not target.exists(), f"two ranks write {path.relative_to(own)}"
            shutil.copyfile(path, target)
    dist.barrier()
    return together


def parameters_of(engine: Any) -> dict[str, Any]:
    return {name: tensor.float().numpy() for name, tensor in engine.full_parameters()}


def averages_of(engine: Any) -> dict[str, Any]:
    return {name: tensor.float().numpy() for name, tensor in engine.full_parameters(averaged=True)}


def digest_of(engine: Any, **options: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in engine.full_parameters(**options):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
