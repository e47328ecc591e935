"""Training checkpoints as the driver sees them: where to go on from, and how one is made whole.

Loads without torch and Ray.
"""

import logging
from typing import TYPE_CHECKING, Any

from rlhf_core.config.training import TrainerSettings
from rlhf_core.store.checkpoints import Checkpoint, complete, newest_complete, rotate
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.rank import Job

if TYPE_CHECKING:
    from rlhf_core.cluster.workers import WorkerGroup

log = logging.getLogger(__name__)


class ResumeError(Exception):
    """A training checkpoint that this group of ranks cannot load. One line."""


def resume_point(group: "WorkerGroup", job: Job, store: Store, history: History, *, timeout_s: float) -> int:
    """Restores the newest complete training checkpoint on every rank; its step, or 0 where there is none."""
    checkpoint, skipped = newest_complete(store, job.stage, job.key)
    for name in skipped:
        log.warning("training checkpoint %s is incomplete and was skipped", name)
    if checkpoint is None:
        return 0
    check_layout(checkpoint, job.settings.trainer)
    group.call("restore_checkpoint", checkpoint, timeout_s=timeout_s)
    history.replace(checkpoint.extra["history"], checkpoint.extra["samples"])
    log.info("going on from training checkpoint step %d", checkpoint.step)
    history.events.write("phase", name="resumed", step=checkpoint.step, skipped=skipped)
    return checkpoint.step


def check_resumable(store: Store, stage: str, key: str, trainer: TrainerSettings) -> None:
    """Raises ResumeError if there is a training checkpoint that ranks laid out as `trainer` says cannot load.

    Reads the store alone, so a driver can ask before it starts anything.
    """
    checkpoint, _ = newest_complete(store, stage, key)
    if checkpoint is not None:
        check_layout(checkpoint, trainer)


def check_layout(checkpoint: Checkpoint, trainer: TrainerSettings) -> None:
    saved = {name: checkpoint.extra[name] for name in ("ranks", "zero_stage")}
    wanted = {"ranks": trainer.ranks, "zero_stage": trainer.zero_stage}
    if saved != wanted:
        raise ResumeError(
            f"training checkpoint {checkpoint.path} was written with trainer.ranks {saved['ranks']} and zero_stage "
            f"{saved['zero_stage']}, this run has {wanted['ranks']} and {wanted['zero_stage']}; run with those of the "
            f"checkpoint, or delete it to start over"
        )


def finish_checkpoint(
    group: "WorkerGroup",
    job: Job,
    store: Store,
    lease: Lease,
    history: History,
    step: int,
    trainer: TrainerSettings,
    *,
    timeout_s: float,
    extra: dict[str, Any] | None = None,
) -> None:
    """Every rank saves and uploads; then, and only then, COMPLETE is written and older ones go."""
    files: dict[str, str] = {}
    for shard in group.call("save_checkpoint", step, timeout_s=timeout_s):
        files |= shard
    layout = {"ranks": trainer.ranks, "zero_stage": trainer.zero_stage}
    curves = {"history": history.records, "samples": history.samples}
    complete(store, job.stage, job.key, step, files, {**layout, **curves, **(extra or {})}, lease)
    rotate(store, job.stage, job.key, trainer.keep_checkpoints)
