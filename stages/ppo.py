"""ppo: reinforcement learning of a policy, by PPO or another algorithm, on a mix of rewards."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.rows import write_jsonl
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.tracking.history import History
from rlhf_core.training.capabilities import check_combination, check_plain_ranks
from rlhf_core.training.progress import check_resumable
from stages.contract import check_head, check_length, check_same_tokenizer, described, input_template
from stages.definition import Stage, StageContext, StageResult
from stages.exporting import export_model
from stages.inputs import check_unchanged, code_digests


def ppo(context: StageContext) -> StageResult:
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rollout.prompts import load_prompts

    settings: PpoSettings = context.settings
    mix = _check_contract(context)
    check_plain_ranks(settings.trainer, context.stage)
    check_combination(settings)
    check_resumable(context.store, context.stage, context.key, settings)
    tokenizer = load_tokenizer(context.inputs["policy"] / "model")
    limit = settings.rollout.max_prompt_len
    template = input_template(context.manifests["policy"])
    prompts, dropped = load_prompts(context.inputs["prompts"] / "rows.jsonl", tokenizer, limit, template)
    eval_prompts, _ = load_prompts(context.inputs["eval"] / "rows.jsonl", tokenizer, limit, template)
    with closing(context.history()) as history:
        measured, facts = _train(context, tokenizer, prompts, eval_prompts, mix, history)
    measured |= {"prompts": len(prompts), "prompts_dropped_too_long": dropped}
    _write_plots(context.files, history)
    write_jsonl(context.files / "samples.jsonl", history.samples)
    model = {
        **facts,
        "input_template": template,
        "model_class": "AutoModelForCausalLM",
        "dtype": settings.dtype,
    }
    return StageResult(context.files, measured, model=model, summary=_summary(measured))


def _check_contract(context: StageContext) -> RewardMix:
    """Refuses what would fail once the engines have started. Returns the mix of rewards, with the RM's mean and std."""
    settings: PpoSettings = context.settings
    check_unchanged(context.node, code_digests(context.node, settings), context.key_source["code"])
    models = {name: context.manifests[name] for name in ("policy", "reward", "process") if name in context.manifests}
    check_same_tokenizer(**models)
    rollout = settings.rollout
    scored = rollout.max_prompt_len + rollout.max_new_tokens
    # The process model reads a placeholder behind each step as well, at most one for each token of a response.
    lengths = {
        "policy": ("ppo.sampler.max_model_len", settings.sampler.max_model_len),
        "reward": ("ppo.rollout.max_prompt_len + max_new_tokens", scored),
        "process": ("ppo.rollout.max_prompt_len + max_new_tokens", scored),
    }
    for name, manifest in models.items():
        what, length = lengths[name]
        check_length(what, length, described(name, manifest), context.inputs[name] / "model")
    if "process" in models:
        check_head("process", models["process"], "process_reward")
    if "reward" not in models:
        return RewardMix(settings.reward)
    head = check_head("reward", models["reward"], "score")
    return RewardMix(settings.reward, rm_mean=head["mean"], rm_std=head["std"])


def _train(
    context: StageContext,
    tokenizer: Any,
    prompts: Sequence[Any],
    eval_prompts: Sequence[Any],
    mix: RewardMix,
    history: History,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what was measured, facts of the exported model's tokenizer)."""
    from rlhf_core.cluster.limit import start_limit
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.models.tokenizer import stop_token_ids
    from rlhf_core.rollout.reward_sources import RewardSources
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler
    from rlhf_core.training.rank import start_trainers
    from rlhf_core.training.rl_loop import RL_TRAINER, PpoRun

    settings: PpoSettings = context.settings
    cluster, events, job = context.run.cluster, context.events, context.job()
    events.phase("starting ranks and sampler")
    with ExitStack() as groups:
        sources = groups.enter_context(RewardSources(settings.reward, Path(job.scratch)))
        groups.enter_context(ray_session(cluster, actors=settings.trainer.ranks + 1))
        # The sampler starts while the trainers do.
        policy = context.inputs["policy"] / "model"
        sampler, starting = start_sampler(policy, settings.sampler, events=events.path, cluster=cluster)
        groups.callback(sampler.close)
        trainers = start_trainers(RL_TRAINER, job, settings.trainer, cluster)
        groups.callback(trainers.close)
        trainers.call("load", timeout_s=start_limit(cluster))
        wait_for_sampler(sampler, starting, cluster)
        run = PpoRun(
            job=job,
            trainers=trainers,
            sampler=sampler,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(policy, tokenizer),
            prompts=prompts,
            eval_prompts=eval_prompts,
            mix=mix,
            sources=sources,
            history=history,
            store=context.store,
            lease=context.lease,
            start_timeout_s=start_limit(cluster),
        )
        measured = run.run()
        events.phase("exporting")
        facts = export_model(trainers, context.files, timeout_s=start_limit(cluster))
    return measured, facts


def _write_plots(files: Path, history: History) -> None:
    from rlhf_core.tracking.plots import plot_curves

    rewards = {
        "reward": history.curve("reward"),
        "reward model (normalised)": history.curve("reward/rm"),
        "process reward model": history.curve("reward/prm"),
        "exact match (sampled)": history.curve("reward/exact"),
        "exact match (greedy, held out)": history.curve("exact_match", "eval"),
    }
    measured = {label: curve for label, curve in rewards.items() if curve[0]}
    plot_curves(files / "plots" / "reward.png", "PPO: reward of the rollouts", measured)
    title = "PPO: KL from the reference, per token"
    curves = {"k1": history.curve("kl"), "sampler against trainer, k3": history.curve("mismatch/kl")}
    plot_curves(files / "plots" / "kl.png", title, {label: curve for label, curve in curves.items() if curve[0]})


def _summary(measured: dict[str, Any]) -> str:
    rows = [
        ("greedy exact match, held out", "exact_match"),
        ("reward", "reward"),
        ("reward model, normalised", "reward/rm"),
        ("process reward model", "reward/prm"),
        ("exact match, sampled", "reward/exact"),
    ]
    table = "\n".join(
        f"| {what} | {measured[f'{name}/first']:.3f} | {measured[f'{name}/last']:.3f} |"
        for what, name in rows
        if f"{name}/first" in measured
    )
    return (
        f"**PPO**: {measured['steps']} steps. Sampler and trainer log-probs differ by at most "
        f"{measured['parity/max']:.1e}.\n\n| | first | last |\n|---|---|---|\n{table}\n"
    )


PPO = Stage(name="ppo", version=3, module="stages.ppo", settings=PpoSettings, pool="gpu", run=ppo)

if __name__ == "__main__":
    from stages.runner import main

    main(PPO)
