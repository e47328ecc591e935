"""dpo: direct preference optimisation of a policy on preference pairs."""

from rlhf_core.config.supervised import DpoSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def dpo(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import DPO_TRAINER

    trained = train_supervised(context, DPO_TRAINER, "AutoModelForCausalLM")
    return StageResult(trained.files, trained.measured, model=trained.model)


DPO = Stage(name="dpo", version=1, module="stages.dpo", settings=DpoSettings, pool="gpu", run=dpo)

if __name__ == "__main__":
    from stages.runner import main

    main(DPO)
