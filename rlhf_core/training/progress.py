"""Training checkpoints as the driver sees them: where to go on from, and how one is made whole.

Loads without torch and Ray.
"""

import logging
import math
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.training import TrainerSettings
from rlhf_core.store.checkpoints import Better, Checkpoint, Shards, complete, download, newest_complete, rotate
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.mesh import zero_stage
from rlhf_core.training.rank import Job
from rlhf_core.training.universal import convert_all

if TYPE_CHECKING:
    from rlhf_core.cluster.workers import WorkerGroup

log = logging.getLogger(__name__)

_CONVERTED = "universal-"  # a training checkpoint's copy while ranks of another number load it


class ResumeError(Exception):
    """A training checkpoint that this group of ranks cannot load. One line."""


@dataclass(frozen=True)
class ShardLayout:
    """How a training checkpoint is divided into files. `optimizer` decides whether DeepSpeed can divide it anew."""

    ranks: int
    zero_stage: int
    tensor_parallel: int
    optimizer: str

    @classmethod
    def of(cls, settings: Any) -> "ShardLayout":
        """`settings` of a trained stage: dtype, trainer, optimizer."""
        trainer: TrainerSettings = settings.trainer
        stage = zero_stage(settings.dtype, trainer)
        return cls(trainer.ranks, stage, trainer.tensor_parallel, settings.optimizer.name)


def resume_point(group: "WorkerGroup", job: Job, store: Store, history: History, *, timeout_s: float) -> int:
    """Restores the newest complete training checkpoint on every rank; its step, or 0 where there is none."""
    checkpoint, skipped = newest_complete(store, job.stage, job.key)
    for name in skipped:
        log.warning("training checkpoint %s is incomplete and was skipped", name)
    if checkpoint is None:
        return 0
    restore(group, job, store, checkpoint, timeout_s=timeout_s)
    curves = checkpoint.extra
    history.replace(curves["history"], curves["samples"], curves["generations"])
    log.info("going on from training checkpoint step %d", checkpoint.step)
    history.events.write("phase", name="resumed", step=checkpoint.step, skipped=skipped)
    return checkpoint.step


def restore(group: "WorkerGroup", job: Job, store: Store, checkpoint: Checkpoint, *, timeout_s: float) -> None:
    """Loads a whole training checkpoint on every rank, converted first if ranks of another number wrote it."""
    beside = str(Path(checkpoint.path).parent)
    for name in store.list_names(beside):
        if name.startswith(_CONVERTED):  # what a kill left
            store.delete_dir(f"{beside}/{name}")
    if not conversion(checkpoint, job.settings):
        group.call("restore_checkpoint", checkpoint, timeout_s=timeout_s)
        return
    path = f"{beside}/{_CONVERTED}{checkpoint.step:06d}"
    with tempfile.TemporaryDirectory(dir=job.scratch, prefix="universal-") as temp:
        directory = download(store, checkpoint, Path(temp) / "checkpoint")
        convert_all(directory)
        files = store.upload_dir(directory, path)
    group.call("restore_checkpoint", replace(checkpoint, path=path, files=files), timeout_s=timeout_s)
    store.delete_dir(path)


def check_resumable(store: Store, stage: str, key: str, settings: Any) -> None:
    """Raises ResumeError if there is a training checkpoint that ranks laid out as `settings` say cannot load.

    Reads the store alone, so a driver can ask before it starts anything.
    """
    checkpoint, _ = newest_complete(store, stage, key)
    if checkpoint is not None:
        conversion(checkpoint, settings)


def conversion(checkpoint: Checkpoint, settings: Any) -> bool:
    """Whether a training checkpoint has to be converted for ranks laid out as `settings` say.

    Raises ResumeError where DeepSpeed cannot: between ZeRO-3 and the other stages, which write their parameters in
    forms of their own; from or to no ZeRO; of tensor-parallel ranks; of Muon's momentum.
    """
    saved, wanted = ShardLayout(**checkpoint.extra["layout"]), ShardLayout.of(settings)
    if saved == wanted or (
        saved.tensor_parallel == wanted.tensor_parallel and saved.zero_stage == wanted.zero_stage == 0
    ):
        return False  # without ZeRO every rank holds everything
    convertible = (
        _FAMILY[saved.zero_stage] == _FAMILY[wanted.zero_stage]
        and saved.tensor_parallel == wanted.tensor_parallel == 1
        and wanted.optimizer == "adamw"
    )
    if not convertible:
        raise ResumeError(
            f"training checkpoint {checkpoint.path} was written with {_words(saved)}, this run has {_words(wanted)}, "
            f"and DeepSpeed cannot convert it; run with those of the checkpoint, or delete it to start over"
        )
    return True


_FAMILY = {0: "none", 1: "flat", 2: "flat", 3: "by parameter"}


def _words(layout: ShardLayout) -> str:
    return (
        f"trainer.ranks {layout.ranks}, ZeRO stage {layout.zero_stage}, tensor_parallel {layout.tensor_parallel} and "
        f"optimizer {layout.optimizer}"
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
    metric: float | None = None,
    better: Better = "lower",
) -> None:
    """Every rank saves and uploads; then, and only then, COMPLETE is written and older ones go.

    metric: what an evaluation at exactly this step gave; the checkpoint with the best one stays.
    """
    shards = sum(group.call("save_checkpoint", step, timeout_s=timeout_s), Shards({}, 0))
    about = {"layout": asdict(ShardLayout.of(job.settings))}
    curves = {"history": history.records, "samples": history.samples, "generations": history.generations}
    finite = metric if metric is not None and math.isfinite(metric) else None
    complete(store, job.stage, job.key, step, shards, {**about, **curves, **(extra or {})}, lease, finite)
    gib = trainer.keep_checkpoints_gib
    max_size = None if gib is None else int(gib * 2**30)
    rotate(store, job.stage, job.key, trainer.keep_checkpoints, better, max_size)
