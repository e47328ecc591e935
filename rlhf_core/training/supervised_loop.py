"""Drives a group of supervised ranks from the newest training checkpoint to the end. Loads without torch."""

from typing import Any

from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.supervised import SupervisedSettings
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.progress import finish_checkpoint, resume_point
from rlhf_core.training.rank import Job

SFT_TRAINER = "rlhf_core.training.supervised:SftTrainer"
RM_TRAINER = "rlhf_core.training.supervised:RmTrainer"


def run_supervised(
    group: WorkerGroup,
    job: Job,
    store: Store,
    lease: Lease,
    history: History,
    *,
    start_timeout_s: float,
) -> dict[str, Any]:
    """Trains to the end, from the newest complete training checkpoint where there is one, and evaluates.

    What moves whole models (loading, restoring, saving) may take start_timeout_s; a step, step_timeout_s.
    Returns the counts of rows and the last evaluation's metrics under "eval/...".
    """
    settings: SupervisedSettings = job.settings
    limit = settings.trainer.step_timeout_s
    history.events.phase("loading")
    info = group.call("load", timeout_s=start_timeout_s)[0]
    total, start = info["total_steps"], resume_point(group, job, store, history, timeout_s=start_timeout_s)
    evaluation: dict[str, float] = {}
    history.events.phase("training")
    for step in range(start + 1, total + 1):
        history.add(step, group.call("train_step", timeout_s=limit)[0])
        history.events.progress(step, total, "training")
        last = step == total
        if info["eval_rows"] and (last or (settings.eval_steps and step % settings.eval_steps == 0)):
            evaluation = group.call("evaluate", timeout_s=limit)[0]
            history.add(step, evaluation, phase="eval")
        if step % settings.trainer.save_steps == 0 or last:
            finish_checkpoint(group, job, store, lease, history, step, settings.trainer, timeout_s=start_timeout_s)
    if info["eval_rows"] and not evaluation:  # resumed at the last step
        evaluation = group.call("evaluate", timeout_s=limit)[0]
    return {**info, **{f"eval/{name}": value for name, value in evaluation.items()}}
