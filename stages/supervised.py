"""What the stages sft and rm share: a group of ranks, the training loop, the export, plots and figures."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.supervised import SupervisedSettings
from rlhf_core.training.progress import check_resumable
from stages.contract import check_length, described
from stages.definition import StageContext
from stages.inputs import check_unchanged, code_digests, foreign_models


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
    from rlhf_core.training.rank import start_trainers
    from rlhf_core.training.supervised_loop import run_supervised

    settings: SupervisedSettings = context.settings
    check_inputs(context)
    cluster = context.run.cluster
    job = context.job()
    check_resumable(context.store, context.stage, context.key, settings.trainer)
    with closing(context.history()) as history:
        context.events.phase("starting ranks")
        with ray_session(cluster, actors=settings.trainer.ranks):
            group = start_trainers(target, job, settings.trainer, cluster)
            try:
                measured = run_supervised(
                    group, job, context.store, context.lease, history, start_timeout_s=cluster.start_timeout_s
                )
                context.events.phase("exporting")
                model = str(context.files / "model")
                facts = group.call("export", model, timeout_s=cluster.start_timeout_s)[0]
            finally:
                group.close()
    curves = {name: history.curve(*key) for name, key in _CURVES.items()}
    return Trained(
        context.files,
        measured,
        model={**facts, "model_class": model_class, "dtype": settings.dtype},
        curves={name: curve for name, curve in curves.items() if curve[0]},
    )


def check_inputs(context: StageContext) -> None:
    """Refuses files that changed since the key was made, and a length that the model has no positions for."""
    settings: SupervisedSettings = context.settings
    stage = context.stage
    check_unchanged(stage, foreign_models(stage, settings), context.key_source["inputs"])
    check_unchanged(stage, code_digests(stage, settings), context.key_source["code"])
    if "model" in context.manifests:
        directory, name = context.inputs["model"] / "model", described("model", context.manifests["model"])
    elif settings.model is not None and settings.model.path is not None:
        directory, name = Path(settings.model.path), f"the model {settings.model.path}"
    else:
        return  # from scratch: the settings have checked it
    check_length(f"{stage}.max_len", settings.max_len, name, directory)


_CURVES = {
    "loss": ("loss", "train"),
    "held-out loss": ("loss", "eval"),
    "accuracy": ("accuracy", "train"),
    "held-out accuracy": ("accuracy", "eval"),
}
