"""Driver's side of training checkpoints: who may go on from one, how many stay, how long each call may take."""

from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.config.supervised import RmSettings
from rlhf_core.config.training import Dtype, OptimizerSettings, TrainerSettings
from rlhf_core.store.checkpoints import Checkpoint, Shards, complete, download, newest_complete
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import EventLog, read_events
from rlhf_core.tracking.history import History
from rlhf_core.training import progress
from rlhf_core.training.progress import ResumeError, ShardLayout, check_resumable, conversion
from rlhf_core.training.rank import Job
from rlhf_core.training.supervised_loop import run_supervised

KEY = "a" * 64


def settings_of(dtype: Dtype = "float32", optimizer: str = "adamw", **trainer: Any) -> RmSettings:
    return RmSettings(
        optimizer=OptimizerSettings(lr=1.0, name=optimizer),  # type: ignore[arg-type]
        batch_size=1,
        max_len=8,
        max_steps=5,
        dtype=dtype,
        trainer=TrainerSettings(**trainer),
    )


def checkpoint_by(settings: RmSettings) -> Checkpoint:
    return Checkpoint(40, "training/rm/k/step-000040", {}, {"layout": asdict(ShardLayout.of(settings))})


@pytest.mark.parametrize(
    ("wrote", "loads", "wanted"),
    [
        ({"ranks": 2}, {"ranks": 2, "micro_batch_size": 1, "activation_checkpointing": True}, False),
        ({"ranks": 2}, {"ranks": 1}, True),
        ({"ranks": 2, "zero_stage": 2}, {"ranks": 2, "zero_stage": 1}, True),
        ({"ranks": 2, "zero_stage": 3}, {"ranks": 1, "zero_stage": 3}, True),
        ({"ranks": 2, "zero_stage": 0}, {"ranks": 1, "zero_stage": 0}, False),
        ({"dtype": "bfloat16", "zero_stage": 0}, {"dtype": "bfloat16", "zero_stage": 1}, False),  # it runs with 1
    ],
)
def test_which_checkpoints_are_converted(wrote: dict[str, Any], loads: dict[str, Any], wanted: bool) -> None:
    assert conversion(checkpoint_by(settings_of(**wrote)), settings_of(**loads)) is wanted


@pytest.mark.parametrize(
    ("wrote", "loads"),
    [
        ({"zero_stage": 2}, {"zero_stage": 3}),
        ({"zero_stage": 3}, {"zero_stage": 1}),
        ({"zero_stage": 0}, {"zero_stage": 2}),
        ({"ranks": 2, "tensor_parallel": 2}, {"ranks": 4, "tensor_parallel": 2}),
        ({"ranks": 2, "tensor_parallel": 2}, {"ranks": 2}),
        ({"ranks": 2, "optimizer": "muon"}, {"ranks": 1, "optimizer": "muon"}),
    ],
)
def test_checkpoint_that_cannot_be_converted_is_refused(wrote: dict[str, Any], loads: dict[str, Any]) -> None:
    with pytest.raises(ResumeError, match="DeepSpeed cannot convert it; run with those of the checkpoint, or delete"):
        conversion(checkpoint_by(settings_of(**wrote)), settings_of(**loads))


def test_checkpoint_of_another_layout_is_refused_from_the_store_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    check_resumable(store, "rm", KEY, settings_of(ranks=2))  # nothing to go on from
    extra = {"layout": asdict(ShardLayout.of(settings_of(ranks=4, zero_stage=3)))}
    complete(store, "rm", KEY, 40, Shards({"x": "0" * 64}, 1), extra, None)
    check_resumable(store, "rm", KEY, settings_of(ranks=2, zero_stage=3))
    with pytest.raises(ResumeError) as caught:
        check_resumable(store, "rm", KEY, settings_of(ranks=2))
    assert str(caught.value) == (
        f"training checkpoint training/rm/{KEY}/step-000040 was written with trainer.ranks 4, ZeRO stage 3, "
        f"tensor_parallel 1 and optimizer adamw, this run has trainer.ranks 2, ZeRO stage 2, tensor_parallel 1 and "
        f"optimizer adamw, and DeepSpeed cannot convert it; run with those of the checkpoint, or delete it to start "
        f"over"
    )


class Calls:
    """In the place of a worker group: answers at once, and notes what was called and how long it might have taken."""

    def __init__(self, store: Store, losses: tuple[float, ...] = (1.0,) * 5, reference_rows: int = 0):
        self._store, self._losses, self._step, self._reference_rows = store, losses, 0, reference_rows
        self.referred: list[int] = []
        self.limits: dict[str, set[float]] = {}
        self.restored: list[int] = []
        self.killed_at: int | None = None
        self.evaluated: list[int] = []
        self.measured = True

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        self.limits.setdefault(method, set()).add(timeout_s)
        return [getattr(self, method)(*args)]

    def load(self, fresh: bool) -> dict[str, int]:
        assert fresh == (newest_complete(self._store, "rm", KEY)[0] is None)
        return {"total_steps": 5, "eval_rows": 3, "reference_rows": self._reference_rows if fresh else 0}

    def refer(self, done: int) -> int:
        self.referred.append(done)
        return min(done + 2, self._reference_rows)

    def end_reference(self) -> None:
        self.referred.append(-1)

    def train_step(self) -> dict[str, float]:
        if self._step + 1 == self.killed_at:
            raise RuntimeError("killed")
        self._step += 1
        self.measured = False
        return {"loss": 1.0}

    def begin_evaluation(self) -> int:
        return 3

    def evaluate_rows(self, done: int) -> int:
        self.evaluated.append(done)
        return min(done + 2, 3)

    def end_evaluation(self) -> dict[str, float]:
        self.measured = True
        return {"loss": self._losses[self._step - 1]}

    def unmeasured(self) -> bool:
        return not self.measured

    def save_checkpoint(self, step: int) -> Shards:
        self._store.write_bytes(f"training/rm/{KEY}/step-{step:06d}/shard", b"x")
        return Shards({"shard": sha256(b"x").hexdigest()}, 2**30)

    def restore_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.measured = False
        self._step = checkpoint.step
        self.restored.append(checkpoint.step)


def run(tmp_path: Path, group: Calls, store: Store, **settings: Any) -> dict[str, Any]:
    given = RmSettings(optimizer=OptimizerSettings(lr=1.0), batch_size=1, max_len=8, max_steps=5, **settings)
    events = EventLog(tmp_path / "events.jsonl")
    lease = acquire(store, "rm", KEY, {"test": True}, 3600)
    job = Job("rm", KEY, given, store.url, lease.n, str(tmp_path))
    history = History(tmp_path, events, TrackingSettings(), run_name="x", config={})
    try:
        return run_supervised(group, job, store, lease, history, start_timeout_s=900)  # type: ignore[arg-type]
    finally:
        lease.release()


def steps_in(store: Store) -> list[str]:
    return sorted(name for name in store.list_names(f"training/rm/{KEY}") if name.startswith("step-"))


def test_loop_keeps_as_many_checkpoints_as_told_and_waits_as_long_as_told(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    group = Calls(store)
    for _ in range(2):  # the second goes on from the last step
        run(tmp_path, group, store, trainer=TrainerSettings(save_steps=1, keep_checkpoints=3, step_timeout_s=7))
    assert steps_in(store) == ["step-000003", "step-000004", "step-000005"]
    newest, _ = newest_complete(store, "rm", KEY)
    assert newest is not None
    assert newest.step == 5
    assert group.evaluated == [0, 2] * 2  # at the end, and for the export of what the second run restored
    assert group.limits == {
        "begin_evaluation": {900},
        "evaluate_rows": {7},
        "end_evaluation": {900},
        "unmeasured": {7},
        "load": {900},
        "restore_checkpoint": {900},
        "save_checkpoint": {900},
        "train_step": {7},
    }


def test_an_export_has_its_weights_evaluated_before(tmp_path: Path) -> None:
    """Beside the checkpoints of steps 2 and 4 for the export alone, so the best is of steps 3 and 5, that of the curve;
    at the end for the weights that were restored."""
    store = Store(str(tmp_path / "store"))
    group = Calls(store, losses=(9.0, 1.0, 3.0, 2.0, 4.0))
    trainer = TrainerSettings(save_steps=2, save_hf=True)
    done = run(tmp_path, group, store, trainer=trainer, eval_steps=3, best_metric="loss")
    assert group.evaluated == [0, 2] * 5
    assert done == {"total_steps": 5, "exported_step": 3, "eval/loss": 3.0}


def test_the_reference_comes_in_parts_and_is_kept_before_the_first_step(tmp_path: Path) -> None:
    """Of 5 rows, 2 a call; a run that ends in its first step does not do them again."""
    store = Store(str(tmp_path / "store"))
    trainer = TrainerSettings(save_steps=3, step_timeout_s=7)
    first, second = Calls(store, reference_rows=5), Calls(store, reference_rows=5)
    first.killed_at = 1
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, first, store, trainer=trainer)
    assert steps_in(store) == ["step-000000"]
    assert first.referred == [0, 2, 4, -1]
    assert first.limits["refer"] == {7}
    assert first.limits["end_reference"] == {900}
    progress = [e for e in read_events(tmp_path / "events.jsonl") if e["type"] == "progress"]
    assert [(e["step"], e["total"], e["phase"]) for e in progress] == [(n, 5, "reference") for n in (2, 4, 5)]
    run(tmp_path, second, store, trainer=trainer)
    assert second.referred == []
    assert second.restored == [0]
    assert steps_in(store) == ["step-000003", "step-000005"]


def test_without_save_steps_the_reference_is_not_kept(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    run(tmp_path, Calls(store, reference_rows=5), store, trainer=TrainerSettings(save_steps=None))
    assert steps_in(store) == []


def test_checkpoints_go_by_their_size_as_well(tmp_path: Path) -> None:
    """Each says that it is of 1 GiB."""
    store = Store(str(tmp_path / "store"))
    trainer = TrainerSettings(save_steps=1, keep_checkpoints=4, keep_checkpoints_gib=2.5)
    run(tmp_path, Calls(store), store, trainer=trainer)
    assert steps_in(store) == ["step-000004", "step-000005"]


def test_without_save_steps_there_is_no_training_checkpoint(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    group = Calls(store)
    done = run(tmp_path, group, store, trainer=TrainerSettings(save_steps=None))
    assert done == {"total_steps": 5, "exported_step": 5, "eval/loss": 1.0}
    assert steps_in(store) == []


def test_loop_ends_with_the_best_weights(tmp_path: Path) -> None:
    """Evaluations 3, 1, 2, 4, 5: step 2 stays although one checkpoint is kept, and is what the ranks end with."""
    store = Store(str(tmp_path / "store"))
    group = Calls(store, losses=(3.0, 1.0, 2.0, 4.0, 5.0))
    trainer = TrainerSettings(save_steps=1, keep_checkpoints=1)
    done = run(tmp_path, group, store, best_metric="loss", eval_steps=1, trainer=trainer)
    assert steps_in(store) == ["step-000002", "step-000005"]
    assert group.restored == [2]
    assert done == {"total_steps": 5, "exported_step": 2, "eval/loss": 1.0}
    again = run(tmp_path, group, store, best_metric="loss", eval_steps=1, trainer=trainer)
    assert again == done
    assert group.restored == [2, 5, 2]


def test_checkpoint_of_other_ranks_is_restored_from_a_converted_copy(tmp_path: Path, monkeypatch: Any) -> None:
    """The ranks get the copy, whole and verified; afterwards the store has the checkpoint alone. A kill in between
    leaves the copy, until the next time, whatever the ranks are then."""
    store = Store(str(tmp_path / "store"))
    written = settings_of(ranks=2)
    shards = Shards({"shard": sha256(b"x").hexdigest()}, 1)
    store.write_bytes(f"training/rm/{KEY}/step-000040/shard", b"x")
    complete(store, "rm", KEY, 40, shards, {"layout": asdict(ShardLayout.of(written))}, None)
    checkpoint, _ = newest_complete(store, "rm", KEY)
    assert checkpoint is not None
    monkeypatch.setattr(progress, "convert_all", lambda directory: (directory / "shard").write_bytes(b"converted"))
    seen = []

    class Group:
        def call(self, method: str, given: Checkpoint, timeout_s: float) -> None:
            there = download(store, given, tmp_path / f"there-{len(seen)}")
            seen.append((method, given.step, (there / "shard").read_bytes(), timeout_s))

    job = Job("rm", KEY, settings_of(ranks=1), store.url, 1, str(tmp_path))
    progress.restore(Group(), job, store, checkpoint, timeout_s=9.0)  # type: ignore[arg-type]
    assert store.list_names(f"training/rm/{KEY}") == ["step-000040"]
    for step in ("000030", "000040"):
        store.write_bytes(f"training/rm/{KEY}/universal-{step}/left", b"x")
    same = Job("rm", KEY, written, store.url, 1, str(tmp_path))
    progress.restore(Group(), same, store, checkpoint, timeout_s=9.0)  # type: ignore[arg-type]
    assert seen.pop() == ("restore_checkpoint", 40, b"x", 9.0)
    assert seen == [("restore_checkpoint", 40, b"converted", 9.0)]
    assert store.list_names(f"training/rm/{KEY}") == ["step-000040"]
