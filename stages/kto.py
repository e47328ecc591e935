"""kto: KTO of a policy on responses that are labelled good or bad."""

from rlhf_core.config.supervised import KtoSettings
from stages.definition import Stage, StageContext, StageResult
from stages.supervised import train_supervised


def kto(context: StageContext) -> StageResult:
    from rlhf_core.training.supervised_loop import KTO_TRAINER

    trained = train_supervised(context, KTO_TRAINER, "AutoModelForCausalLM")
    rewards = {"rewards/desirable": "good responses", "rewards/undesirable": "bad responses"}
    trained.plot("rewards.png", "KTO: implicit reward, beta x log-ratio to the reference", rewards)
    trained.plot("kl.png", "KTO: estimated KL from the reference", {"kl": "KL"})
    good, bad = (trained.metrics.get(f"eval/rewards/{kind}") for kind in ("desirable", "undesirable"))
    held_out = good is not None and bad is not None
    sentences = [f"Held-out reward {good:.3f} of good responses, {bad:.3f} of bad ones."] if held_out else []
    return trained.result("KTO", *sentences)


KTO = Stage(name="kto", version=1, module="stages.kto", settings=KtoSettings, pool="gpu", run=kto)

if __name__ == "__main__":
    from stages.runner import main

    main(KTO)
