"""Trainer ranks in processes of their own, and the programs that tests run on them by name.

Loaded by path: by conftest.py in the test process, and by `Ranks` in each rank, where it runs as "__rank__". So it
imports torch and DeepSpeed inside the programs alone.
"""

import hashlib
import multiprocessing
import os
import runpy
import shutil
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
ANSWER_S = 240.0  # far above what any program takes: a rank that hangs fails its test instead of stopping the session


class Ranks:
    """`size` processes, joined in one process group, that run a program of this file together."""

    def __init__(self, size: int):
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            given = {"CONNECTION": theirs, "RANK": rank, "RANKS": size}
            process = context.Process(
                target=runpy.run_path, args=(__file__,), kwargs={"init_globals": given, "run_name": "__rank__"}
            )
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def join(self) -> None:
        """Forms the process group, which takes as long as the imports do."""
        port = self._answers([self._connections[0]], [("open_rendezvous", {})])[0]
        self.run("join", port=port)

    def run(self, program: str, **arguments: Any) -> list[Any]:
        """What `program(rank, ranks, **arguments)` returned on each rank. Raises what a rank raised, as text."""
        return self._answers(self._connections, [(program, arguments)] * self.size)

    def _answers(self, connections: list[Connection], calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        for connection, call in zip(connections, calls, strict=True):
            connection.send(call)
        results = []
        for rank, connection in enumerate(connections):
            if not connection.poll(ANSWER_S):
                raise TimeoutError(f"rank {rank} gave no answer to {calls[rank][0]} within {ANSWER_S:.0f} s")
            results.append(connection.recv())
        for rank, (ok, value) in enumerate(results):
            if not ok:
                raise RuntimeError(f"rank {rank}:\n{value}")
        return [value for _, value in results]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(connection: Connection, rank: int, ranks: int) -> None:
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TQDM_DISABLE="1", HF_HUB_OFFLINE="1")
    kept: dict[str, Any] = {}
    while True:
        try:
            program, arguments = connection.recv()
        except EOFError:
            break
        try:
            if program == "open_rendezvous":
                from rlhf_core.training import process

                kept["store"] = process.open_rendezvous(HOST, ranks)
                connection.send((True, kept["store"].port))
            elif program == "join":
                from rlhf_core.training import process

                process.join(rank, ranks, HOST, arguments["port"], kept.get("store"))
                kept["joined"] = True
                connection.send((True, None))
            else:
                connection.send((True, globals()[program](rank, ranks, **arguments)))
        except BaseException:  # noqa: BLE001 - the test process raises it again
            connection.send((False, traceback.format_exc()))
    if kept.get("joined"):
        import torch.distributed as dist

        dist.destroy_process_group()


# -- programs -----------------------------------------------------------------------------------------------------


def train(
    rank: int,
    ranks: int,
    *,
    kind: str,
    model: str,
    zero_stage: int,
    samples: Sequence[Any],
    micro_batch_size: int,
    steps: int = 1,
    optimizer: dict[str, Any],
    dtype: str = "float32",
    total_steps: int = 100,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Optimizer steps on the same samples. Parameters (of rank 0) and each step's figures."""
    from rlhf_core.training.engine import means

    engine, objective, make_batch = _built(
        kind, model, zero_stage, dtype, optimizer, total_steps, checkpointing=checkpointing
    )
    share = len(samples) // ranks
    mine = samples[rank * share : (rank + 1) * share]
    parts = [mine[start : start + micro_batch_size] for start in range(0, share, micro_batch_size)]
    results = [engine.step([make_batch(part) for part in parts], objective) for _ in range(steps)]
    parameters = _parameters(engine)
    engine.engine.destroy()
    return {
        "parameters": parameters if rank == 0 else {name: array.shape for name, array in parameters.items()},
        "loss": [r.loss for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "lr": [r.lr for r in results],
        "metrics": [means(r.metrics) for r in results],
    }


def resume(
    rank: int,
    ranks: int,
    *,
    model: str,
    zero_stage: int,
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
    share = len(samples) // ranks
    mine = samples[rank * share : (rank + 1) * share]

    def engine_of() -> Any:
        return _built("sft", model, zero_stage, dtype, optimizer, before + after)

    def run(built: Any, first: int, count: int) -> list[tuple[float, float]]:
        engine, objective, make_batch = built
        done = []
        for step in range(first, first + count):
            batches = [make_batch(mine[: 1 + step % share]), make_batch(mine)]
            result = engine.step(batches, objective)
            done.append((result.loss, result.lr))
        return done

    def saved(engine: Any, name: str) -> Path:
        """Each rank to a directory of its own, then all files together, as through the store."""
        own, whole = root / f"{name}-{rank}", root / name
        own.mkdir(parents=True)
        engine.save(own / "model")
        process.save_rng(own, rank)
        dist.barrier()
        for path in sorted(own.rglob("*")):
            if path.is_file():
                target = whole / path.relative_to(own)
                target.parent.mkdir(parents=True, exist_ok=True)
                assert not target.exists(), f"two ranks write {path.relative_to(own)}"
                shutil.copyfile(path, target)
        dist.barrier()
        return whole

    torch.manual_seed(11 + rank)
    built = engine_of()
    straight = run(built, 0, before + after)
    straight_digest, _ = _digest(built[0]), saved(built[0], "straight")
    built[0].engine.destroy()

    torch.manual_seed(11 + rank)
    built = engine_of()
    first = run(built, 0, before)
    checkpoint = saved(built[0], "checkpoint")
    built[0].engine.destroy()

    torch.manual_seed(99)  # a new process would have drawn otherwise
    built = engine_of()
    built[0].load(checkpoint / "model")
    process.load_rng(checkpoint, rank)
    second = run(built, before, after)
    resumed_digest, _ = _digest(built[0]), saved(built[0], "resumed")
    built[0].engine.destroy()
    return {
        "straight": straight,
        "resumed": first + second,
        "straight_digest": straight_digest,
        "resumed_digest": resumed_digest,
    }


def gathered(rank: int, ranks: int, *, kind: str, model: str, zero_stage: int, bucket: int) -> dict[str, Any]:
    """`full_parameters` with small buckets, before any step."""
    engine, _, _ = _built(kind, model, zero_stage, "float32", {"lr": 1e-3}, 10)
    parameters = {name: tensor.numpy() for name, tensor in engine.full_parameters(bucket)}
    engine.engine.destroy()
    return parameters


def export(
    rank: int, ranks: int, *, kind: str, model: str, zero_stage: int, samples: Any, directory: str, pad: int = 0
) -> Any:
    """One step, then the export; what the trained module gives for `samples`, rows of token ids padded each way."""
    import torch

    from rlhf_core.data.batches import model_inputs
    from rlhf_core.models.scorer import last_token_scores

    engine, objective, make_batch = _built(
        kind, model, zero_stage, "float32", {"lr": 1e-2, "warmup_ratio": 0.0}, 10, pad=pad
    )
    engine.step([make_batch(samples)], objective)
    engine.export(directory)
    answers = None
    if kind == "rm":
        rows = [ids for pair in samples for ids, _ in pair]
        alone = [
            last_token_scores(engine.infer(**(one := model_inputs([ids], pad))), one["attention_mask"]).item()
            for ids in rows
        ]
        right = model_inputs(rows, pad)
        width = right["input_ids"].shape[1]
        left = {
            "input_ids": torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in rows]),
            "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]),
        }
        answers = {
            "alone": alone,
            "right": last_token_scores(engine.infer(**right), right["attention_mask"]).tolist(),
            "left": last_token_scores(engine.infer(**left), left["attention_mask"]).tolist(),
        }
    engine.engine.destroy()
    return answers


def all_masked(rank: int, ranks: int, *, model: str, zero_stage: int, samples: Sequence[Any]) -> dict[str, Any]:
    """A step without a response token on any rank, then one where rank 1 alone has none, then an ordinary one."""
    import math

    engine, objective, make_batch = _built("sft", model, zero_stage, "float32", {"lr": 1e-2}, 10)
    ordinary, empty = make_batch(samples), make_batch(samples)
    empty["loss_mask"] = empty["loss_mask"] & False
    message = ""
    try:
        engine.step([empty, empty], objective)
    except ValueError as error:
        message = str(error)
    partly = engine.step([ordinary if rank == 0 else empty], objective)
    after = engine.step([ordinary], objective)
    engine.engine.destroy()
    return {"message": message, "losses": [partly.loss, after.loss], "finite": math.isfinite(after.grad_norm)}


def not_finite(rank: int, ranks: int, *, model: str, samples: Sequence[Any]) -> str:
    """An ordinary step, then one whose loss is NaN on rank 1 alone."""
    import torch

    from rlhf_core.training.supervised_objectives import SftObjective

    class Broken(SftObjective):
        def loss(self, batch: Any, outputs: Any) -> Any:
            return super().loss(batch, outputs * (torch.nan if rank == 1 else 1.0))

    engine, objective, make_batch = _built("sft", model, 2, "float32", {"lr": 1e-2}, 10)
    engine.step([make_batch(samples)], objective)
    try:
        engine.step([make_batch(samples)], Broken())
    except ValueError as error:
        return str(error)
    finally:
        engine.engine.destroy()
    return ""


def rollout_in_one(rank: int, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Two optimizer steps, of 10 and of 90 tokens, and none."""
    from rlhf_core.training.engine import StepResult
    from rlhf_core.training.rl import over_steps

    steps = [
        StepResult(loss=1.0, grad_norm=2.0, lr=0.5, metrics={"clipped": (3.0, 10.0), "empty": (0.0, 0.0)}),
        StepResult(loss=2.0, grad_norm=4.0, lr=0.1, metrics={"clipped": (9.0, 90.0), "empty": (0.0, 0.0)}),
    ]
    return over_steps(steps), over_steps([])


def ppo(rank: int, ranks: int, *, job: Any, samples: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """A trainer as the stage has it: what the critic starts from, and digests of policy and critic after each step."""
    from rlhf_core.training.experience import Scored
    from rlhf_core.training.rl import RlTrainer

    made = RlTrainer(rank, ranks, job)
    made.load()
    names = ("prompt_ids", "response_ids", "action_mask", "logprobs", "values")
    scored = [Scored(**{n: s[n] for n in names}, ref_logprobs=s["logprobs"], reward_score=0.0) for s in samples]
    critic = _parameters(made.critic)
    digests, metrics = [(_digest(made.policy), _digest(made.critic))], []
    for step in range(1, steps + 1):
        metrics.append(made.train(step, [float(n) for n in range(len(scored))], scored))
        digests.append((_digest(made.policy), _digest(made.critic)))
    engines = (made.policy, made.critic, made.reference, made.reward)
    attention = [engine.module.lm.config._attn_implementation for engine in engines]
    for engine in (made.policy, made.critic):
        engine.engine.destroy()
    return {"critic": critic, "digests": digests, "metrics": metrics, "attention": attention}


def listening(rank: int, ranks: int) -> list[str]:
    """Addresses that this rank listens on, once its group has talked."""
    import psutil
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    sockets = psutil.Process().net_connections("inet")
    return [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]


def lr_factors(rank: int, ranks: int, *, settings: dict[str, Any], total_steps: int) -> list[float]:
    from rlhf_core.config.training import OptimizerSettings
    from rlhf_core.training.engine import lr_factor

    factor = lr_factor(OptimizerSettings(lr=1.0, **settings), total_steps)
    return [factor(step) for step in range(total_steps + 1)]


def supervised(rank: int, ranks: int, *, trainer: str, job: Any, train_steps: int) -> dict[str, Any]:
    """A trainer as a stage has it, from the store: evaluation before and after `train_steps`, and its counts."""
    from rlhf_core.training import supervised as module

    made = getattr(module, trainer)(rank, ranks, job)
    counts = made.load()
    before = made.evaluate()
    steps = [made.train_step() for _ in range(train_steps)]
    after = made.evaluate()
    made.engine.engine.destroy()
    return {"counts": counts, "before": before, "steps": steps, "after": after}


def trainer_resume(rank: int, ranks: int, *, job: Any, before: int, after: int) -> dict[str, Any]:
    """A trainer's own training checkpoint through the store, and a run without one."""
    import torch.distributed as dist

    from rlhf_core.store.checkpoints import complete, newest_complete
    from rlhf_core.store.leases import attach
    from rlhf_core.store.store import Store
    from rlhf_core.training.supervised import SftTrainer

    def loaded() -> SftTrainer:
        made = SftTrainer(rank, ranks, job)
        made.load()
        return made

    straight = loaded()
    losses = [straight.train_step()["loss"] for _ in range(before + after)]
    digest = _digest(straight.engine)
    straight.engine.engine.destroy()

    first = loaded()
    resumed = [first.train_step()["loss"] for _ in range(before)]
    own = first.save_checkpoint(before)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, own)
    store = Store(job.store_url)
    if rank == 0:
        files = {name: sha for one in everyone for name, sha in one.items()}
        complete(store, job.stage, job.key, before, files, {}, attach(store, job.stage, job.key, job.lease))
    dist.barrier()
    first.engine.engine.destroy()

    second = loaded()
    checkpoint, _ = newest_complete(store, job.stage, job.key)
    assert checkpoint is not None
    second.restore_checkpoint(checkpoint)
    position = second.position
    resumed += [second.train_step()["loss"] for _ in range(after)]
    resumed_digest = _digest(second.engine)
    second.engine.engine.destroy()
    return {
        "straight": losses,
        "resumed": resumed,
        "straight_digest": digest,
        "resumed_digest": resumed_digest,
        "position": position,
    }


# -- what programs share ------------------------------------------------------------------------------------------


def _built(
    kind: str,
    model: str,
    zero_stage: int,
    dtype: str,
    optimizer: dict[str, Any],
    total_steps: int,
    *,
    checkpointing: bool = False,
    pad: int = 0,
) -> tuple[Any, Any, Any]:
    """(engine, objective, samples -> micro-batch) for one of the four objectives."""
    from rlhf_core.config.training import OptimizerSettings, TrainerSettings
    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.scorer import load_scorer
    from rlhf_core.training.engine import TORCH_DTYPE, TrainEngine

    def build() -> Any:
        if kind in ("sft", "policy"):
            return load_policy(model, dtype=TORCH_DTYPE[dtype], attention="sdpa")
        return load_scorer(model, dtype=TORCH_DTYPE[dtype], attention="sdpa", pad_token_id=pad)

    objective, make_batch = _objective(kind, pad)
    engine = TrainEngine(
        build,
        dtype=dtype,
        trainer=TrainerSettings(zero_stage=zero_stage, activation_checkpointing=checkpointing),
        optimizer=OptimizerSettings(**optimizer),
        total_steps=total_steps,
    )
    return engine, objective, make_batch


def _objective(kind: str, pad: int) -> tuple[Any, Any]:
    from rlhf_core.config.rl import AlgorithmSettings
    from rlhf_core.data.batches import Exchange
    from rlhf_core.training.experience import Experience, Scored, experience_batch
    from rlhf_core.training.rl_objectives import PolicyObjective, ValueObjective
    from rlhf_core.training.supervised_objectives import PairwiseObjective, SftObjective, pair_batch, sft_batch

    def rl_batch(samples: Sequence[dict[str, Any]]) -> Any:
        import numpy as np
        import torch

        def padded(name: str) -> Any:
            width = max(len(s["response_ids"]) for s in samples)
            rows = [np.pad(s[name], (0, width - len(s[name]))) for s in samples]
            return torch.tensor(np.stack(rows), dtype=torch.float32)

        scored = [
            Scored(
                **{name: s[name] for name in ("prompt_ids", "response_ids", "action_mask", "logprobs", "values")},
                ref_logprobs=s["logprobs"],
                reward_score=0.0,
            )
            for s in samples
        ]
        experience = Experience(scored, padded("advantages"), padded("returns"))
        return experience_batch(experience, range(len(samples)), pad_token_id=pad)

    if kind == "sft":
        return SftObjective(), lambda samples: sft_batch([Exchange(*s) for s in samples], pad)
    if kind == "rm":
        return PairwiseObjective(), lambda samples: pair_batch([(Exchange(*a), Exchange(*b)) for a, b in samples], pad)
    if kind == "policy":
        return PolicyObjective(AlgorithmSettings(), temperature=0.7), rl_batch
    return ValueObjective(AlgorithmSettings()), rl_batch


def _parameters(engine: Any) -> dict[str, Any]:
    return {name: tensor.float().numpy() for name, tensor in engine.full_parameters()}


def _digest(engine: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in engine.full_parameters():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__rank__":
    _serve(CONNECTION, RANK, RANKS)  # type: ignore[name-defined]  # noqa: F821 - given by Ranks
