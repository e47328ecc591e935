"""ppo: PPO from the SFT policy, with a critic, a KL penalty against the SFT policy, and a mix of rewards."""

from pathlib import Path
from typing import Any

from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.rewards import RewardMix
from stages.contract import check_head, check_same_tokenizer
from stages.definition import Stage, StageContext, StageResult


def ppo(context: StageContext) -> StageResult:
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rollout.prompts import load_prompts
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler
    from rlhf_core.tracking.history import History
    from rlhf_core.training.rank import Job, start_trainers
    from rlhf_core.training.rl_loop import RL_TRAINER, PpoRun

    settings: PpoSettings = context.settings
    policy, reward = context.manifests["policy"], context.manifests["reward"]
    check_same_tokenizer(policy=policy, reward=reward)
    mean, std = check_head("reward", reward)
    tokenizer = load_tokenizer(context.inputs["policy"] / "model")
    limit = settings.rollout.max_prompt_len
    prompts, dropped = load_prompts(context.inputs["prompts"] / "rows.jsonl", tokenizer, limit)
    eval_prompts, _ = load_prompts(context.inputs["eval"] / "rows.jsonl", tokenizer, limit)
    job = Job(
        stage=context.stage,
        key=context.key,
        settings=settings,
        store_url=context.store.url,
        lease=context.lease.n,
        scratch=str(context.scratch),
        manifests=context.manifests,
    )
    files = context.scratch / "artifact"
    name = f"{context.node}-{context.key[:8]}"
    history = History(
        files, context.events, context.run.tracking, run_name=name, config=settings.model_dump(mode="json")
    )
    cluster = context.run.cluster
    context.events.phase("starting ranks and sampler")
    with ray_session(cluster, actors=settings.trainer.ranks + 1):
        # The sampler starts while the trainers do.
        sampler, starting = start_sampler(
            context.inputs["policy"] / "model", settings.sampler, events=context.events.path, cluster=cluster
        )
        trainers = start_trainers(RL_TRAINER, job, settings.trainer, cluster)
        try:
            trainers.call("load", timeout_s=cluster.start_timeout_s)
            wait_for_sampler(sampler, starting, cluster)
            run = PpoRun(
                job=job,
                trainers=trainers,
                sampler=sampler,
                tokenizer=tokenizer,
                prompts=prompts,
                eval_prompts=eval_prompts,
                mix=RewardMix(settings.reward, mean, std),
                history=history,
                store=context.store,
                lease=context.lease,
            )
            measured = run.run()
            context.events.phase("exporting")
            facts = trainers.call("export", str(files / "model"), timeout_s=cluster.start_timeout_s)[0]
        finally:
            trainers.close()
            sampler.close()
            history.close()
    measured |= {"prompts": len(prompts), "prompts_dropped_too_long": dropped}
    _write_plots(files, history)
    _write_samples(files, context.events.path)
    model = {**facts, "model_class": "AutoModelForCausalLM", "dtype": settings.dtype}
    return StageResult(files, measured, model=model, summary=_summary(measured))


def _write_plots(files: Path, history: Any) -> None:
    from rlhf_core.tracking.plots import plot_curves

    plot_curves(
        files / "plots" / "reward.png",
        "PPO: reward of the rollouts",
        {
            "reward": history.curve("reward"),
            "reward model (normalised)": history.curve("reward/rm"),
            "exact match (sampled)": history.curve("reward/exact"),
            "exact match (greedy, held out)": history.curve("exact_match", "eval"),
        },
    )
    plot_curves(files / "plots" / "kl.png", "PPO: KL from the SFT policy, per token", {"k1": history.curve("kl")})


def _write_samples(files: Path, events: Path) -> None:
    """The samples shown during training."""
    from rlhf_core.data.rows import write_jsonl
    from rlhf_core.tracking.events import read_events

    write_jsonl(files / "samples.jsonl", (event for event in read_events(events) if event["type"] == "sample"))


def _summary(measured: dict[str, Any]) -> str:
    rows = [
        ("greedy exact match, held out", "exact_match"),
        ("reward", "reward"),
        ("reward model, normalised", "reward/rm"),
        ("exact match, sampled", "reward/exact"),
    ]
    table = "\n".join(f"| {what} | {measured[f'{k}/first']:.3f} | {measured[f'{k}/last']:.3f} |" for what, k in rows)
    return (
        f"**PPO**: {measured['steps']} steps. Sampler and trainer log-probs differ by at most "
        f"{measured['parity/max']:.1e}.\n\n| | first | last |\n|---|---|---|\n{table}\n"
    )


PPO = Stage(name="ppo", version=1, module="stages.ppo", settings=PpoSettings, pool="gpu", run=ppo)

if __name__ == "__main__":
    from stages.runner import main

    main(PPO)
