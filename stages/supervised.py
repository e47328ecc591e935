"""What the stages sft and rm share: a group of ranks, the training loop, the export, plots and figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.training import SupervisedSettings
from stages.definition import StageContext


@dataclass(frozen=True)
class Trained:
    """Files of the artifact, and what training measured."""

    files: Path
    measured: dict[str, Any]
    model: dict[str, Any]
    curves: dict[str, tuple[list[int], list[float]]]


def train_supervised(context: StageContext, target: str, model_class: str) -> Trained:
    """Runs the trainers `target` to the end and exports the model into the artifact's directory."""
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.tracking.history import History
    from rlhf_core.training.rank import Job, start_trainers
    from rlhf_core.training.supervised_loop import run_supervised

    settings: SupervisedSettings = context.settings
    files = context.scratch / "artifact"
    job = Job(
        stage=context.stage,
        key=context.key,
        settings=settings,
        store_url=context.store.url,
        lease=context.lease.n,
        scratch=str(context.scratch),
        manifests=context.manifests,
    )
    history = History(
        files,
        context.events,
        context.run.tracking,
        run_name=f"{context.node}-{context.key[:8]}",
        config=settings.model_dump(mode="json"),
    )
    context.events.phase("starting ranks")
    with ray_session(context.run.cluster, actors=settings.trainer.ranks):
        group = start_trainers(target, job, settings.trainer, context.run.cluster)
        try:
            measured = run_supervised(group, job, context.store, context.lease, history)
            context.events.phase("exporting")
            facts = group.call("export", str(files / "model"), timeout_s=context.run.cluster.start_timeout_s)[0]
        finally:
            group.close()
            history.close()
    model = {**facts, "model_class": model_class, "dtype": settings.dtype}
    curves = {name: history.curve(*key) for name, key in _CURVES.items()}
    return Trained(files, measured, model, {name: curve for name, curve in curves.items() if curve[0]})


_CURVES = {
    "loss": ("loss", "train"),
    "held-out loss": ("loss", "eval"),
    "accuracy": ("accuracy", "train"),
    "held-out accuracy": ("accuracy", "eval"),
}
