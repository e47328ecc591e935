"""What the supervised stages share: checks, tokens, a group of ranks, the training loop, the export, the loss plot."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.base import SettingsError
from rlhf_core.config.supervised import SupervisedSettings
from rlhf_core.tracking.history import History
from rlhf_core.tracking.plots import Curve, plot_curves
from rlhf_core.training.capabilities import check_combination, check_model
from rlhf_core.training.progress import check_resumable
from stages.contract import check_length, described
from stages.definition import StageContext, StageResult
from stages.exporting import adapter_facts, export_model
from stages.inputs import check_unchanged, code_digests, fetch_hub_models, foreign_models
from stages.tokens import Tokens, tokenise


@dataclass(frozen=True)
class Trained:
    """Files of the artifact, and what training measured. `model`: the manifest's facts of the exported model."""

    files: Path
    metrics: dict[str, Any]
    model: dict[str, Any]
    history: History
    tokens: Tokens

    def plot(self, file: str, title: str, metrics: dict[str, str]) -> None:
        """plots/<file> with each metric (name -> label) in training and, where it was evaluated, held out."""
        curves: dict[str, Curve] = {}
        for name, label in metrics.items():
            curves[label] = self.history.curve(name)
            curves[f"{label}, held out"] = self.history.curve(name, "eval")
        plot_curves(self.files / "plots" / file, title, {label: curve for label, curve in curves.items() if curve[0]})

    def result(self, title: str, *sentences: str) -> StageResult:
        """The stage's result; its summary: steps, loss, then `sentences` and the report of its data."""
        metrics = self.metrics
        losses = f"Loss {metrics['first_loss']:.3f} -> {metrics['last_loss']:.3f}"
        if "eval/loss" in metrics:
            losses += f", held out {metrics['eval/loss']:.3f}"
        first = f"**{title}**: {metrics['total_steps']} steps over {metrics['items']} rows. {losses}."
        summary = " ".join([first, *sentences]) + f"\n\n{self.tokens.report}"
        return StageResult(self.files, metrics, model=self.model, summary=summary)


def train_supervised(context: StageContext, target: str, model_class: str) -> Trained:
    """Runs the trainers `target` to the end and exports the model into the artifact's directory.

    Whatever the settings, the inputs or the rows do not allow is an error before Ray starts.
    """
    from transformers import AutoConfig

    from rlhf_core.cluster.limit import start_limit
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.data.encode import read_chat_template
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.training.rank import start_trainers
    from rlhf_core.training.supervised_loop import run_supervised

    settings: SupervisedSettings = context.settings
    fetch_hub_models(settings)
    directory = model_directory(context)
    check_inputs(context, directory)
    check_combination(settings)
    check_model(
        settings.trainer,
        AutoConfig.from_pretrained(directory),
        max_len=settings.max_len,
        aux_loss_coef=settings.aux_loss_coef,
    )
    check_resumable(context.store, context.stage, context.key, settings)
    tokens = tokenise(context, load_tokenizer(directory))
    cluster = context.run.cluster
    limit = start_limit(cluster)
    job = context.job(tokens.keys, read_chat_template(settings.text))
    with closing(context.history()) as history:
        context.events.phase("starting ranks")
        with ray_session(cluster, actors=settings.trainer.ranks):
            group = start_trainers(target, job, settings.trainer, cluster)
            try:
                measured = run_supervised(group, job, context.store, context.lease, history, start_timeout_s=limit)
                context.events.phase("exporting")
                facts = export_model(group, context.files, timeout_s=limit)
            finally:
                group.close()
    losses = history.curve("loss")[1]
    trained = Trained(
        context.files,
        {**tokens.counts, **measured, "first_loss": losses[0], "last_loss": losses[-1]},
        model={
            **facts,
            **adapter_facts(settings.lora, context.files / "model"),
            "input_template": settings.text.input_template if settings.text.format == "template" else None,
            "model_class": model_class,
            "dtype": settings.dtype,
        },
        history=history,
        tokens=tokens,
    )
    trained.plot("loss.png", f"{context.stage}: loss", {"loss": "loss"})
    return trained


def model_directory(context: StageContext) -> Path:
    """The Hugging Face directory that training starts from, on this node: an artifact's, the user's, one in the cache
    of the hub, or a small Llama made here."""
    from rlhf_core.training.rank import base_model_directory

    settings: SupervisedSettings = context.settings
    if settings.model is None:
        return context.inputs["model"] / "model"
    return base_model_directory(settings.model, str(context.scratch), "driver")


def check_inputs(context: StageContext, directory: Path) -> None:
    """Refuses files that changed since the key was made, and a length that the model in `directory` has no positions
    for."""
    settings: SupervisedSettings = context.settings
    stage = context.stage
    check_unchanged(stage, foreign_models(stage, settings), context.key_source["inputs"])
    check_unchanged(stage, code_digests(stage, settings), context.key_source["code"])
    if "eval.jsonl" not in context.manifests["data"].files:
        asked = {"eval_steps": settings.eval_steps, "best_metric": settings.best_metric}
        for setting, value in asked.items():
            if value is not None:
                raise SettingsError(
                    f"{stage}.{setting} is {value}, and the data has no held-out rows to evaluate on; give the data "
                    f"set an eval_path, eval_hub, eval_split or eval_share, or set {stage}.{setting} to null"
                )
    name = described("model", context.manifests["model"]) if settings.model is None else f"{stage}.model"
    check_length(f"{stage}.max_len", settings.max_len, name, directory)
