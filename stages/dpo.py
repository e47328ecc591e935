"""dpo: direct preference optimisation (or IPO, cDPO) of a policy on preference pairs."""

from rlhf_core.config.supervised import DpoSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def dpo(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import DPO_TRAINER

    trained = train_supervised(context, DPO_TRAINER, "AutoModelForCausalLM")
    title = "DPO: share of pairs with the chosen response's reward above the rejected one's"
    trained.plot("accuracy.png", title, {"accuracy": "accuracy"})
    rewards = {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}
    trained.plot("rewards.png", "DPO: implicit reward, beta x log-ratio to the reference", rewards)
    sentences = []
    if "eval/accuracy" in trained.metrics:
        accuracy, margin = trained.metrics["eval/accuracy"], trained.metrics["eval/margin"]
        sentences = [f"Held-out accuracy **{100 * accuracy:.1f} %**, reward margin {margin:.3f}."]
    return trained.result("DPO", *sentences)


DPO = Stage(name="dpo", version=1, module="stages.dpo", settings=DpoSettings, pool="gpu", run=dpo)

if __name__ == "__main__":
    from stages.runner import main

    main(DPO)
