"""kto: KTO of a policy on responses that are labelled good or bad."""

from rlhf_core.config.supervised import KtoSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def kto(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import KTO_TRAINER

    trained = train_supervised(context, KTO_TRAINER, "AutoModelForCausalLM")
    return StageResult(trained.files, trained.measured, model=trained.model)


KTO = Stage(name="kto", version=1, module="stages.kto", settings=KtoSettings, pool="gpu", run=kto)

if __name__ == "__main__":
    from stages.runner import main

    main(KTO)
