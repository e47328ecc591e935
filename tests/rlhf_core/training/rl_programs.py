"""Programs of RL's trainer that ranks.py runs. Torch and DeepSpeed are imported inside them alone."""

from collections.abc import Sequence
from typing import Any

from engine_parts import digest_of, parameters_of


def rollout_in_one(rank: int, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Two optimizer steps, of 10 and of 90 tokens, and none."""
    from rlhf_core.training.engine import StepResult
    from rlhf_core.training.rl import over_steps

    steps = [
        StepResult(loss=1.0, grad_norm=2.0, lr=0.5, metrics={"clipped": (3.0, 10.0), "empty": (0.0, 0.0)}),
        StepResult(loss=2.0, grad_norm=4.0, lr=0.1, metrics={"clipped": (9.0, 90.0), "empty": (0.0, 0.0)}),
    ]
    return over_steps(steps), over_steps([])


def trainer_of(rank: int, ranks: int, job: Any) -> Any:
    from rlhf_core.training.rl import RlTrainer

    made = RlTrainer(rank, ranks, job)
    made.load()
    return made


def close(made: Any) -> None:
    for engine in (made.policy, made.critic, made.reference, made.reward, made.process):
        if engine is not None:
            engine.close()


def ppo(rank: int, ranks: int, *, job: Any, samples: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """A trainer as the stage has it: what the critic starts from, and digests of policy and critic after each step."""
    from rlhf_core.training.experience import Graded, Scored

    made = trainer_of(rank, ranks, job)
    names = ("prompt_ids", "response_ids", "action_mask", "logprobs", "values")
    scored = [
        Scored(
            **{n: s[n] for n in names},
            sampler_logprobs=s["logprobs"],
            entropy=s["logprobs"],
            ref_logprobs=s["logprobs"],
        )
        for s in samples
    ]
    graded = [Graded(reward=float(number), group=number) for number in range(len(scored))]
    critic = parameters_of(made.critic)
    digests, metrics = [(digest_of(made.policy), digest_of(made.critic))], []
    for step in range(1, steps + 1):
        metrics.append(made.train(step, graded, [range(len(scored))], scored))
        digests.append((digest_of(made.policy), digest_of(made.critic)))
    engines = (made.policy, made.critic, made.reference, made.reward)
    attention = [engine.module.lm.config._attn_implementation for engine in engines]
    close(made)
    return {"critic": critic, "digests": digests, "metrics": metrics, "attention": attention}


def judged(rank: int, ranks: int, *, job: Any, trajectories: Sequence[Any]) -> list[Any]:
    """What the models of rewards say of each trajectory, in micro-batches of two."""
    made = trainer_of(rank, ranks, job)
    numbers = range(len(trajectories))
    found = made.judge(trajectories, [[[number] for number in numbers[at : at + 2]] for at in numbers[::2]])
    close(made)
    return found
