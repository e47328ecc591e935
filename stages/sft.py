"""sft: supervised fine-tuning of the base model on prompt and response, with the loss on the response."""

from rlhf_core.config.supervised import SftSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def sft(context: StageContext) -> StageResult:
    from rlhf_core.tracking.plots import plot_curves
    from rlhf_core.training.supervised_loop import SFT_TRAINER

    trained = train_supervised(context, SFT_TRAINER, "AutoModelForCausalLM")
    plot_curves(
        trained.files / "plots" / "loss.png",
        "SFT: loss per response token",
        {name: curve for name, curve in trained.curves.items() if "loss" in name},
    )
    losses = trained.curves["loss"][1]
    metrics = {**trained.measured, "first_loss": losses[0], "last_loss": losses[-1]}
    summary = (
        f"**SFT**: {metrics['total_steps']} steps over {metrics['kept']} rows "
        f"({metrics['dropped_too_long']} dropped as too long). Loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    )
    if "eval/loss" in metrics:
        summary += f", held out {metrics['eval/loss']:.3f}"
    return StageResult(trained.files, metrics, model=trained.model, summary=summary + ".\n")


SFT = Stage(name="sft", version=2, module="stages.sft", settings=SftSettings, pool="gpu", run=sft)

if __name__ == "__main__":
    from stages.runner import main

    main(SFT)
