"""rm: a reward model, one score for a response, trained on preference pairs with a pairwise loss."""

from rlhf_core.config.supervised import RmSettings
from stages.contract import check_held_out
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def rm(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import RM_TRAINER

    check_held_out("rm", "pairs", context.manifests["data"])
    trained = train_supervised(context, RM_TRAINER, "AutoModelForSequenceClassification")
    title = "RM: share of pairs with the chosen response above the rejected one"
    trained.plot("accuracy.png", title, {"accuracy": "accuracy"})
    head = trained.model["head"]
    return trained.result(
        "RM",
        f"Held-out accuracy **{100 * trained.metrics['eval/accuracy']:.1f} %**; "
        f"scores {head['mean']:.2f} ± {head['std']:.2f}.",
    )


RM = Stage(name="rm", version=2, module="stages.rm", settings=RmSettings, pool="gpu", run=rm)

if __name__ == "__main__":
    from stages.runner import main

    main(RM)
