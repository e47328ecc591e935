"""Programs of RL's trainer that ranks.py runs. Torch and DeepSpeed are imported inside them alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_parts import digest_of, gather_files, parameters_of


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


def scored(rank: int, ranks: int, *, job: Any, trajectories: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What policy, reference, critic and reward model say of each trajectory."""
    from rlhf_core.training.rl_batches import shares

    made = trainer_of(rank, ranks, job)
    (share,) = shares([len(t.prompt_ids) + len(t.response_ids) for t in trajectories], made.layout)
    dealt = [trajectories[number] for number in share.numbers]
    place = {number: at for at, number in enumerate(share.numbers)}
    by_rank = made.score(dealt, share.micro_batches), made.judge(dealt, share.micro_batches)
    close(made)
    both = [[own[place[number]] for number in range(len(trajectories))] for own in by_rank]
    return both[0], both[1]


def dealt_to(made: Any, trajectories: Sequence[Any]) -> list[Any]:
    """Each rank's share."""
    from rlhf_core.training.rl_batches import shares

    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    return shares(lengths, made.layout, made.mesh.peers)


def on_all_ranks(made: Any, method: str, trajectories: Sequence[Any]) -> list[list[Any]]:
    """What each rank finds of its share."""
    import torch.distributed as dist

    own = dealt_to(made, trajectories)[made.rank]
    shards: list[Any] = [None] * made.ranks
    dist.all_gather_object(shards, getattr(made, method)([trajectories[n] for n in own.numbers], own.micro_batches))
    return shards


def in_order(made: Any, method: str, trajectories: Sequence[Any]) -> list[Any]:
    """What all ranks find, in the order of the trajectories."""
    from rlhf_core.training.rl import _in_order

    numbers = [share.numbers for share in dealt_to(made, trajectories)]
    return _in_order(numbers, on_all_ranks(made, method, trajectories))


def rollout_step(made: Any, trajectories: Sequence[Any], number: int) -> dict[str, float]:
    """Scores the trajectories and trains on them."""
    from rlhf_core.training.experience import Graded

    graded = [Graded(reward=0.5 * t.sample_id % 3, group=t.group_id) for t in trajectories]
    numbers = [share.numbers for share in dealt_to(made, trajectories)]
    return made.train(number, graded, numbers, *on_all_ranks(made, "score", trajectories))


def trained(
    rank: int, ranks: int, *, job: Any, trajectories: Sequence[Any], steps: int, directory: str
) -> dict[str, Any]:
    """All that a run does with its ranks: it judges and scores before and after `steps` rollouts of the trajectories,
    sends its weights and exports the policy into `directory`."""
    made = trainer_of(rank, ranks, job)
    done: dict[str, Any] = {"judged": in_order(made, "judge", trajectories)}
    scored, metrics = [in_order(made, "score", trajectories)], []
    start = None if made.critic is None else parameters_of(made.critic)
    for number in range(1, steps + 1):
        metrics.append(rollout_step(made, trajectories, number))
        scored.append(in_order(made, "score", trajectories))
    transfer = Path(directory) / "transfer"
    transfer.mkdir(parents=True, exist_ok=True)
    index = made.write_weights(str(transfer), steps, False)
    facts = made.export(str(Path(directory) / "model"))
    critic = None if made.critic is None else parameters_of(made.critic)
    done |= {"scored": scored, "metrics": metrics, "index": index, "facts": facts, "state": made.state}
    close(made)
    return {**done, "critic": critic, "critic before": start}


def resumed(
    rank: int, ranks: int, *, job: Any, trajectories: Sequence[Any], before: int, after: int, directory: str
) -> dict[str, Any]:
    """Rollouts of a run without a break and of one that goes on from its training checkpoint: state, and digests of
    all that a step depends on; names of the checkpoint's files."""

    def facts(made: Any) -> dict[str, Any]:
        engines = {"policy": made.policy, "critic": made.critic, "reference": made.reference}
        digests = {n: digest_of(e) for n, e in engines.items() if e is not None}
        return {"state": made.state, "averaged": digest_of(made.policy, averaged=True), **digests}

    straight = trainer_of(rank, ranks, job)
    start = facts(straight)
    for number in range(1, before + after + 1):
        rollout_step(straight, trajectories, number)
    whole = facts(straight)
    close(straight)

    first = trainer_of(rank, ranks, job)
    for number in range(1, before + 1):
        rollout_step(first, trajectories, number)
    own = Path(directory) / f"own-{rank}"
    own.mkdir(parents=True)
    first._save(own)
    together = gather_files(own, Path(directory) / "together")
    close(first)

    second = trainer_of(rank, ranks, job)
    second._restore(together)
    for number in range(before + 1, before + after + 1):
        rollout_step(second, trajectories, number)
    broken = facts(second)
    close(second)
    files = sorted(str(path.relative_to(together)) for path in together.rglob("*") if path.is_file())
    return {"start": start, "whole": whole, "resumed": broken, "files": files}
