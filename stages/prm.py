"""prm: a process reward model, which judges each step of a solution, trained on step-labelled solutions."""

from typing import Any

from rlhf_core.config.supervised import PrmSettings
from rlhf_core.tracking.plots import Curve, plot_curves
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import Trained, train_supervised


def prm(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import PRM_TRAINER

    trained = train_supervised(context, PRM_TRAINER, "AutoModelForCausalLM")
    trained.model["head"] = _head(context.settings)
    trained.plot("accuracy.png", "PRM: share of steps judged rightly", {"accuracy": "accuracy"})
    sentences = _held_out(trained) if "eval/accuracy" in trained.metrics else []
    return trained.result("PRM", *sentences)


def _head(settings: PrmSettings) -> dict[str, Any]:
    """What whoever scores with this model has to know, for the manifest."""
    return {
        "name": "process_reward",
        "placeholder_token": settings.placeholder_token,
        "reward_tokens": list(settings.reward_tokens),
        "separator": settings.separator,
        "labels": settings.labels,
    }


def _held_out(trained: Trained) -> list[str]:
    """Draws the calibration and adds its error to the metrics; what the summary says of the held-out steps."""
    from rlhf_core.training.objectives_process import calibration_error

    plot_curves(
        trained.files / "plots" / "calibration.png",
        "PRM: held-out steps by their place in the solution",
        calibration_curves(trained.metrics),
        xlabel="step of the solution (9: the ninth and later ones)",
    )
    means = {name.removeprefix("eval/"): value for name, value in trained.metrics.items() if name.startswith("eval/")}
    error = trained.metrics["eval/calibration_error"] = calibration_error(means)
    return [f"Held-out step accuracy **{100 * means['accuracy']:.1f} %**, expected calibration error {error:.3f}."]


def calibration_curves(metrics: dict[str, Any]) -> dict[str, Curve]:
    """By the step's place in its solution: share labelled right, mean predicted probability of it, accuracy."""
    labels = {"step label": "labelled right", "step probability": "predicted right", "step accuracy": "accuracy"}
    curves: dict[str, Curve] = {}
    for name, label in labels.items():
        values = {key.removeprefix(f"eval/{name}/"): metrics[key] for key in metrics if key.startswith(f"eval/{name}/")}
        points = sorted((int(place.rstrip("+")), value) for place, value in values.items())
        curves[label] = [place for place, _ in points], [value for _, value in points]
    return curves


PRM = Stage(name="prm", version=1, module="stages.prm", settings=PrmSettings, pool="gpu", run=prm)

if __name__ == "__main__":
    from stages.runner import main

    main(PRM)
