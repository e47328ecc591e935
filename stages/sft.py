"""sft: supervised fine-tuning of the base model on responses or conversations, or pre-training on plain text."""

from rlhf_core.config.supervised import SftSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def sft(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import SFT_TRAINER

    return train_supervised(context, SFT_TRAINER, "AutoModelForCausalLM").result("SFT")


SFT = Stage(name="sft", version=2, module="stages.sft", settings=SftSettings, pool="gpu", run=sft)

if __name__ == "__main__":
    from stages.runner import main

    main(SFT)
