"""Drives a group of supervised ranks from the newest training checkpoint to the end. Loads without torch."""

from typing import Any

from rlhf_core.cluster.limit import Limit
from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.base import SettingsError
from rlhf_core.config.supervised import SupervisedSettings
from rlhf_core.store.checkpoints import best_complete, newest_complete
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.progress import finish_checkpoint, restore, resume_point
from rlhf_core.training.rank import Job

SFT_TRAINER = "rlhf_core.training.supervised:SftTrainer"
RM_TRAINER = "rlhf_core.training.reward:RmTrainer"
PRM_TRAINER = "rlhf_core.training.reward:PrmTrainer"
DPO_TRAINER = "rlhf_core.training.preference:DpoTrainer"
KTO_TRAINER = "rlhf_core.training.preference:KtoTrainer"

Metrics = dict[str, float]


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

    With `best_metric` the ranks end with the weights of the best evaluation. What moves whole models may take
    start_timeout_s; a step, and a step's rows under the reference or in an evaluation, step_timeout_s.

    Returns the number of steps, and metrics of the evaluation of the weights that the ranks hold under "eval/...".
    """
    settings: SupervisedSettings = job.settings
    limit = Limit(settings.trainer.step_timeout_s, f"{job.stage}.trainer.step_timeout_s")

    def evaluate() -> Metrics:
        return _evaluate(group, limit=limit, start_timeout_s=start_timeout_s)

    def save(step: int, metric: float | None = None) -> None:
        if settings.trainer.save_hf and group.call("unmeasured", timeout_s=limit)[0]:
            evaluate()
        finish_checkpoint(
            group,
            job,
            store,
            lease,
            history,
            step,
            settings.trainer,
            timeout_s=start_timeout_s,
            metric=metric,
            better=settings.better,
        )

    history.events.phase("loading")
    fresh = newest_complete(store, job.stage, job.key)[0] is None
    info = group.call("load", fresh, timeout_s=start_timeout_s)[0]
    total, start = info["total_steps"], resume_point(group, job, store, history, timeout_s=start_timeout_s)
    if info["reference_rows"]:
        _refer(group, history, info["reference_rows"], limit=limit, start_timeout_s=start_timeout_s)
        if settings.trainer.saves_at(0, total):
            save(0)  # whoever tries again has the reference's log-probs
    history.events.phase("training")
    for step in range(start + 1, total + 1):
        history.add(step, group.call("train_step", timeout_s=limit)[0])
        history.events.progress(step, total, "training")
        metric = None
        if info["eval_rows"] and _evaluates(settings, step, total):
            evaluation = evaluate()
            history.add(step, evaluation, phase="eval")
            metric = _measured(settings, evaluation)
        if settings.trainer.saves_at(step, total) or _improved(settings, history, step):
            save(step, metric)
    best = _restore_best(group, job, store, history, total, timeout_s=start_timeout_s)
    if group.call("unmeasured", timeout_s=limit)[0]:
        evaluate()
    evaluation = _evaluation(history, best)
    return {
        "total_steps": total,
        "exported_step": best,
        **{f"eval/{name}": value for name, value in evaluation.items()},
    }


def _refer(group: WorkerGroup, history: History, rows: int, *, limit: float, start_timeout_s: float) -> None:
    """The reference's log-probs of all rows, about an optimizer step's rows a call."""
    history.events.phase("reference")
    done = 0
    while done < rows:
        done = group.call("refer", done, timeout_s=limit)[0]
        history.events.progress(done, rows, "reference")
    group.call("end_reference", timeout_s=start_timeout_s)


def _evaluate(group: WorkerGroup, *, limit: float, start_timeout_s: float) -> Metrics:
    """Of all held-out rows, about an optimizer step's rows a call."""
    rows = group.call("begin_evaluation", timeout_s=start_timeout_s)[0]
    done = 0
    while done < rows:
        done = group.call("evaluate_rows", done, timeout_s=limit)[0]
    return group.call("end_evaluation", timeout_s=start_timeout_s)[0]


def _evaluates(settings: SupervisedSettings, step: int, total: int) -> bool:
    return step == total or (settings.eval_steps is not None and step % settings.eval_steps == 0)


def _measured(settings: SupervisedSettings, evaluation: Metrics) -> float | None:
    """Raises SettingsError where the held-out rows give no value for best_metric."""
    if settings.best_metric is None:
        return None
    if settings.best_metric not in evaluation:
        raise SettingsError(
            f"best_metric {settings.best_metric!r} has no value: the held-out rows have nothing that it counts; give "
            f"others, or another metric of {', '.join(settings.metrics)}"
        )
    return evaluation[settings.best_metric]


def _improved(settings: SupervisedSettings, history: History, step: int) -> bool:
    """Whether the evaluation at `step`, if there was one, is better than each before it."""
    if settings.best_metric is None:
        return False
    steps, values = history.curve(settings.best_metric, "eval")
    if not steps or steps[-1] != step:
        return False
    sign = 1 if settings.better == "higher" else -1
    return all(sign * values[-1] > sign * before for before in values[:-1])


def _restore_best(group: WorkerGroup, job: Job, store: Store, history: History, total: int, *, timeout_s: float) -> int:
    """The step whose weights the ranks now hold: that of the best evaluation, or the last."""
    settings: SupervisedSettings = job.settings
    if settings.best_metric is None:
        return total
    best = best_complete(store, job.stage, job.key, settings.better)
    if best is None or best.step == total:
        return total
    history.events.write("phase", name="best", step=best.step)
    restore(group, job, store, best, timeout_s=timeout_s)
    return best.step


def _evaluation(history: History, step: int) -> Metrics:
    """Metrics of the evaluation at `step`: they are in the history, which every training checkpoint holds."""
    for record in reversed(history.records):
        if record["phase"] == "eval" and record["step"] == step:
            return {name: float(value) for name, value in record.items() if name not in ("step", "phase")}
    return {}
