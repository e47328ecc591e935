"""Trainer ranks in processes of their own, and the programs that tests run on them by name.

Loaded by path: by conftest.py in the test process, and by `Ranks` in each rank, where it runs as "__rank__". So it
imports torch and DeepSpeed inside the programs alone. Other programs are in engine_programs.py and lora_programs.py.
"""

import importlib
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))
import engine_programs
import lora_programs
from engine_parts import digest_of

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
        """What `program(rank, ranks, **arguments)` returned on each rank. Raises what a rank raised, as text.

        program: a function's name here, or "module:function".
        """
        return self._answers(self._connections, [(program, arguments)] * self.size)

    def _answers(self, connections: list[Connection], calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        for connection, call in zip(connections, calls, strict=True):
            connection.send(call)
        results = []
        for rank, connection in enumerate(connections):
            if not connection.poll(ANSWER_S):
                others = [value for ok, value in results if not ok]  # what this rank may be waiting for
                raise TimeoutError(f"rank {rank} gave no answer to {calls[rank][0]} within {ANSWER_S:.0f} s; {others}")
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
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Muon's kernels would compile for half a minute
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
                programs = {**vars(engine_programs), **vars(lora_programs), **globals()}
                function = named(program) if ":" in program else programs[program]
                connection.send((True, function(rank, ranks, **arguments)))
        except BaseException:  # noqa: BLE001 - the test process raises it again
            connection.send((False, traceback.format_exc()))
    if kept.get("joined"):
        import torch.distributed as dist

        dist.destroy_process_group()


# -- programs -----------------------------------------------------------------------------------------------------


def listening(rank: int, ranks: int) -> list[str]:
    """Addresses that this rank listens on, once its group has talked."""
    import psutil
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    sockets = psutil.Process().net_connections("inet")
    return [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]


def supervised(
    rank: int,
    ranks: int,
    *,
    target: str,
    job: Any,
    train_steps: int,
    export: str | None = None,
    evaluate_between: bool = False,
) -> dict[str, Any]:
    """A trainer as a stage has it, from the store: evaluation before and after `train_steps`, and its counts."""
    made = named(target)(rank, ranks, job)
    counts = loaded(made, fresh=True)
    before = evaluated(made)
    steps = []
    for _ in range(train_steps):
        steps.append(made.train_step())
        if evaluate_between:
            evaluated(made)
    after = evaluated(made)
    facts = made.export(export) if export is not None else None
    made.engine.close()
    return {"counts": counts, "before": before, "steps": steps, "after": after, "facts": facts}


def evaluated(made: Any) -> dict[str, float]:
    """As the loop asks for it; with the number of its calls."""
    rows, done, calls = made.begin_evaluation(), 0, 0
    while done < rows:
        done, calls = made.evaluate_rows(done), calls + 1
    return {**made.end_evaluation(), "calls": calls}


def trainer_resume(rank: int, ranks: int, *, target: str, job: Any, before: int, after: int) -> dict[str, Any]:
    """A trainer's own training checkpoint through the store, and a run without one."""
    import torch.distributed as dist

    from rlhf_core.store.checkpoints import Shards, complete, newest_complete
    from rlhf_core.store.leases import attach
    from rlhf_core.store.store import Store
    from rlhf_core.training import rank as rank_module

    def new(fresh: bool = True) -> Any:
        made = named(target)(rank, ranks, job)
        loaded(made, fresh)
        return made

    straight = new()
    losses = [straight.train_step()["loss"] for _ in range(before + after)]
    digest = digest_of(straight.engine)
    straight.engine.close()

    first = new()
    resumed = [first.train_step()["loss"] for _ in range(before)]
    own = first.save_checkpoint(before)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, own)
    store = Store(job.store_url)
    if rank == 0:
        shards = sum(everyone, Shards({}, 0))
        complete(store, job.stage, job.key, before, shards, {}, attach(store, job.stage, job.key, job.lease))
    dist.barrier()
    first.engine.close()

    second = new(fresh=False)
    checkpoint, _ = newest_complete(store, job.stage, job.key)
    assert checkpoint is not None
    with patch.object(rank_module, "download", wraps=rank_module.download) as download:
        second.restore_checkpoint(checkpoint)
    position = second.position
    resumed += [second.train_step()["loss"] for _ in range(after)]
    resumed_digest = digest_of(second.engine)
    second.engine.close()
    return {
        "straight": losses,
        "resumed": resumed,
        "straight_digest": digest,
        "resumed_digest": resumed_digest,
        "position": position,
        "downloads": download.call_count,
    }


def loaded(trainer: Any, fresh: bool) -> dict[str, int]:
    """Ready for its first step, as supervised_loop.py does it; what `load` returned."""
    about = trainer.load(fresh)
    done = 0
    while done < about["reference_rows"]:
        done = trainer.refer(done)
    if done:
        trainer.end_reference()
    return about


def named(target: str) -> Any:
    """What "module:name" stands for."""
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__rank__":
    _serve(CONNECTION, RANK, RANKS)  # type: ignore[name-defined]  # noqa: F821 - given by Ranks
