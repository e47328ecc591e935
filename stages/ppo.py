"""ppo: PPO from the SFT policy, with a critic, a KL penalty against the SFT policy, and a mix of rewards."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.rows import write_jsonl
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.tracking.history import History
from rlhf_core.training.progress import check_resumable
from stages.contract import check_head, check_length, check_same_tokenizer, described
from stages.definition import Stage, StageContext, StageResult


def ppo(context: StageContext) -> StageResult:
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rollout.prompts import load_prompts

    settings: PpoSettings = context.settings
    mean, std = _check_contract(context)
    check_resumable(context.store, context.stage, context.key, settings.trainer)
    tokenizer = load_tokenizer(context.inputs["policy"] / "model")
    limit = settings.rollout.max_prompt_len
    prompts, dropped = load_prompts(context.inputs["prompts"] / "rows.jsonl", tokenizer, limit)
    eval_prompts, _ = load_prompts(context.inputs["eval"] / "rows.jsonl", tokenizer, limit)
    with closing(context.history()) as history:
        mix = RewardMix(settings.reward, mean, std)
        measured, facts = _train(context, tokenizer, prompts, eval_prompts, mix, history)
    measured |= {"prompts": len(prompts), "prompts_dropped_too_long": dropped}
    _write_plots(context.files, history)
    write_jsonl(context.files / "samples.jsonl", history.samples)
    model = {**facts, "model_class": "AutoModelForCausalLM", "dtype": settings.dtype}
    return StageResult(context.files, measured, model=model, summary=_summary(measured))


def _check_contract(context: StageContext) -> tuple[float, float]:
    """Refuses what would fail once the engines have started. Returns the reward model's (mean, std)."""
    settings: PpoSettings = context.settings
    policy, reward = context.manifests["policy"], context.manifests["reward"]
    check_same_tokenizer(policy=policy, reward=reward)
    length = settings.sampler.max_model_len
    check_length("ppo.sampler.max_model_len", length, described("policy", policy), context.inputs["policy"] / "model")
    rollout = settings.rollout
    scored = rollout.max_prompt_len + rollout.max_new_tokens
    what = "ppo.rollout.max_prompt_len + max_new_tokens"
    check_length(what, scored, described("reward", reward), context.inputs["reward"] / "model")
    return check_head("reward", reward)


def _train(
    context: StageContext,
    tokenizer: Any,
    prompts: Sequence[Any],
    eval_prompts: Sequence[Any],
    mix: RewardMix,
    history: History,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what was measured, facts of the exported model's tokenizer)."""
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler
    from rlhf_core.training.rank import start_trainers
    from rlhf_core.training.rl_loop import RL_TRAINER, PpoRun

    settings: PpoSettings = context.settings
    cluster, events, job = context.run.cluster, context.events, context.job()
    events.phase("starting ranks and sampler")
    with ray_session(cluster, actors=settings.trainer.ranks + 1), ExitStack() as groups:
        # The sampler starts while the trainers do.
        policy = context.inputs["policy"] / "model"
        sampler, starting = start_sampler(policy, settings.sampler, events=events.path, cluster=cluster)
        groups.callback(sampler.close)
        trainers = start_trainers(RL_TRAINER, job, settings.trainer, cluster)
        groups.callback(trainers.close)
        trainers.call("load", timeout_s=cluster.start_timeout_s)
        wait_for_sampler(sampler, starting, cluster)
        run = PpoRun(
            job=job,
            trainers=trainers,
            sampler=sampler,
            tokenizer=tokenizer,
            prompts=prompts,
            eval_prompts=eval_prompts,
            mix=mix,
            history=history,
            store=context.store,
            lease=context.lease,
            start_timeout_s=cluster.start_timeout_s,
        )
        measured = run.run()
        events.phase("exporting")
        facts = trainers.call("export", str(context.files / "model"), timeout_s=cluster.start_timeout_s)[0]
    return measured, facts


def _write_plots(files: Path, history: History) -> None:
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


PPO = Stage(name="ppo", version=2, module="stages.ppo", settings=PpoSettings, pool="gpu", run=ppo)

if __name__ == "__main__":
    from stages.runner import main

    main(PPO)
