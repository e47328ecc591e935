"""Driver's side of training checkpoints: who may go on from one, how many stay, how long each call may take."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.config.supervised import RmSettings
from rlhf_core.config.training import OptimizerSettings, TrainerSettings
from rlhf_core.store.checkpoints import complete, newest_complete
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import EventLog
from rlhf_core.tracking.history import History
from rlhf_core.training.progress import ResumeError, check_resumable
from rlhf_core.training.rank import Job
from rlhf_core.training.supervised_loop import run_supervised

KEY = "a" * 64


def test_checkpoint_of_other_ranks_is_refused_from_the_store_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    check_resumable(store, "sft", KEY, TrainerSettings(ranks=2))  # nothing to go on from
    complete(store, "sft", KEY, 40, {"x": "0" * 64}, {"ranks": 4, "zero_stage": 2}, None)
    check_resumable(store, "sft", KEY, TrainerSettings(ranks=4, zero_stage=2))
    for trainer, has in ((TrainerSettings(ranks=2), "2 and 2"), (TrainerSettings(ranks=4, zero_stage=3), "4 and 3")):
        with pytest.raises(ResumeError) as caught:
            check_resumable(store, "sft", KEY, trainer)
        assert str(caught.value) == (
            f"training checkpoint training/sft/{KEY}/step-000040 was written with trainer.ranks 4 and zero_stage 2, "
            f"this run has {has}; run with those of the checkpoint, or delete it to start over"
        )


class Calls:
    """In the place of a worker group: answers at once, and notes how long each call might have taken."""

    def __init__(self, store: Store):
        self._store, self.limits = store, {}

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        self.limits.setdefault(method, set()).add(timeout_s)
        if method == "save_checkpoint":
            self._store.write_bytes(f"training/rm/{KEY}/step-{args[0]:06d}/shard", b"x")
            return [{"shard": "0" * 64}]
        return [{"load": {"total_steps": 5, "eval_rows": 1}, "restore_checkpoint": None}.get(method, {"loss": 1.0})]


def test_loop_keeps_as_many_checkpoints_as_told_and_waits_as_long_as_told(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    trainer = TrainerSettings(save_steps=1, keep_checkpoints=3, step_timeout_s=7)
    settings = RmSettings(optimizer=OptimizerSettings(lr=1.0), batch_size=1, max_len=8, max_steps=5, trainer=trainer)
    lease = acquire(store, "rm", KEY, {"test": True}, 3600)
    events = EventLog(tmp_path / "events.jsonl")
    job = Job("rm", KEY, settings, store.url, lease.n, str(tmp_path))
    group = Calls(store)
    for _ in range(2):  # the second goes on from the last step
        history = History(tmp_path, events, TrackingSettings(), run_name="x", config={})
        run_supervised(group, job, store, lease, history, start_timeout_s=900)  # type: ignore[arg-type]
    names = store.list_names(f"training/rm/{KEY}")
    assert sorted(name for name in names if name.startswith("step-")) == ["step-000003", "step-000004", "step-000005"]
    newest, _ = newest_complete(store, "rm", KEY)
    assert newest is not None
    assert newest.step == 5
    assert group.limits == {
        "load": {900},
        "restore_checkpoint": {900},
        "save_checkpoint": {900},
        "train_step": {7},
        "evaluate": {7},
    }
