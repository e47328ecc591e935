"""prm: a process reward model, which judges each step of a solution, trained on step-labelled solutions."""

from rlhf_core.config.supervised import PrmSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def prm(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import PRM_TRAINER

    trained = train_supervised(context, PRM_TRAINER, "AutoModelForCausalLM")
    return StageResult(trained.files, trained.measured, model=trained.model)


PRM = Stage(name="prm", version=1, module="stages.prm", settings=PrmSettings, pool="gpu", run=prm)

if __name__ == "__main__":
    from stages.runner import main

    main(PRM)
