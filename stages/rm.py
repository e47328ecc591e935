"""rm: a reward model on the SFT model, trained on preference pairs with the pairwise sigmoid loss."""

import math
from typing import Any

from rlhf_core.config.supervised import RmSettings
from rlhf_core.store.store import StoreError
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def rm(context: StageContext) -> StageResult:
    from rlhf_core.tracking.plots import plot_curves
    from rlhf_core.training.supervised_loop import RM_TRAINER

    if not context.manifests["data"].metrics.get("eval_rows"):
        raise StoreError(
            "the pairs have no held-out rows, and the reward model's accuracy and normalisation are measured on "
            "them; give data.pairs an eval_path or, when generated, eval_rows"
        )
    trained = train_supervised(context, RM_TRAINER, "AutoModelForSequenceClassification")
    plot_curves(
        trained.files / "plots" / "accuracy.png",
        "RM: share of pairs with the chosen response above the rejected one",
        {name: curve for name, curve in trained.curves.items() if "accuracy" in name},
    )
    metrics = trained.measured
    head = {"name": "score", **score_statistics(metrics)}
    summary = (
        f"**RM**: {metrics['total_steps']} steps over {metrics['kept']} pairs "
        f"({metrics['dropped_too_long']} dropped as too long). Held-out accuracy "
        f"**{100 * metrics['eval/accuracy']:.1f} %**, loss {metrics['eval/loss']:.3f}; "
        f"scores {head['mean']:.2f} ± {head['std']:.2f}.\n"
    )
    return StageResult(trained.files, metrics, model={**trained.model, "head": head}, summary=summary)


def score_statistics(metrics: dict[str, Any]) -> dict[str, float]:
    """Mean and standard deviation of the held-out scores, chosen and rejected together."""
    mean = metrics["eval/score"]
    variance = max(0.0, metrics["eval/score squared"] - mean**2)
    return {"mean": mean, "std": max(math.sqrt(variance), 1e-8)}


RM = Stage(name="rm", version=2, module="stages.rm", settings=RmSettings, pool="gpu", run=rm)

if __name__ == "__main__":
    from stages.runner import main

    main(RM)
