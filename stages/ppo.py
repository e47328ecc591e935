"""ppo: reinforcement learning of a policy, by PPO or another algorithm, on a mix of rewards."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.dump import RolloutDump
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.store.manifest import Manifest
from rlhf_core.tracking.history import History
from rlhf_core.training.capabilities import check_combination, check_model
from rlhf_core.training.progress import check_resumable
from rlhf_core.training.rank import Job
from stages.contract import check_head, check_length, check_models, described, input_template
from stages.definition import Stage, StageContext, StageResult
from stages.exporting import adapter_facts, export_model
from stages.inputs import check_unchanged, code_digests
from stages.ppo_shown import summary, write_shown
from stages.tokens import tokenise_ptx


def ppo(context: StageContext) -> StageResult:
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rollout.evaluation import check_best_metric
    from rlhf_core.rollout.prompts import load_prompts

    settings: PpoSettings = context.settings
    mix = _check_contract(context)
    check_combination(settings)
    _check_models(context)
    check_resumable(context.store, context.stage, context.key, settings)
    tokenizer = load_tokenizer(context.inputs["policy"] / "model")
    limit = settings.rollout.max_prompt_len
    template = input_template(context.manifests["policy"])
    prompts, dropped = load_prompts(context.inputs["prompts"] / "rows.jsonl", tokenizer, limit, template)
    eval_prompts, _ = load_prompts(context.inputs["eval"] / "rows.jsonl", tokenizer, limit, template)
    check_best_metric(settings.best_metric, eval_prompts)
    tokens, counts = tokenise_ptx(context, tokenizer)
    job = context.job(tokens)
    with closing(context.history()) as history:
        measured, facts = _train(context, job, tokenizer, prompts, eval_prompts, mix, history)
    measured |= {"prompts": len(prompts), "prompts_dropped_too_long": dropped, **counts}
    write_shown(context.files, history)
    model = {
        **facts,
        **adapter_facts(settings.lora, context.files / "model"),
        "input_template": template,
        "model_class": "AutoModelForCausalLM",
        "dtype": settings.dtype,
    }
    return StageResult(context.files, measured, model=model, summary=summary(measured, history.generations))


def _check_contract(context: StageContext) -> RewardMix:
    """Refuses what would fail once the engines have started. Returns the mix of rewards, with the RM's mean and std."""
    settings: PpoSettings = context.settings
    check_unchanged(context.node, code_digests(context.node, settings), context.key_source["code"])
    rollout = settings.rollout
    scored = rollout.max_prompt_len + rollout.max_new_tokens
    # The process model reads a placeholder behind each step as well, at most one for each token of a response.
    lengths = {
        "policy": ("ppo.sampler.max_model_len", settings.sampler.max_model_len),
        "reward": ("ppo.rollout.max_prompt_len + max_new_tokens", scored),
        "process": ("ppo.rollout.max_prompt_len + max_new_tokens", scored),
    }
    check_models(context.manifests, context.inputs, lengths)
    if settings.ptx is not None:
        policy = described("policy", context.manifests["policy"])
        check_length("ppo.ptx.max_len", settings.ptx.max_len, policy, context.inputs["policy"] / "model")
    return reward_mix(settings.reward, context.manifests)


def reward_mix(settings: RewardSettings, models: Mapping[str, Manifest]) -> RewardMix:
    """With the mean and std of the reward model, where there is one."""
    if "reward" not in models:
        return RewardMix(settings)
    head = check_head("reward", models["reward"], "score")
    return RewardMix(settings, rm_mean=head["mean"], rm_std=head["std"])


def _check_models(context: StageContext) -> None:
    """Refuses what a model's architecture does not allow."""
    from transformers import AutoConfig

    settings: PpoSettings = context.settings
    longest = max(settings.sampler.max_model_len, settings.ptx.max_len if settings.ptx is not None else 0)
    balanced = {"policy": settings.aux_loss_coef}
    if settings.critic is not None:
        start = "reward" if settings.critic_init == "rm" else "policy"
        balanced[start] = max(balanced.get(start, 0.0), settings.critic.aux_loss_coef)
    for name in ("policy", "reward", "process"):
        if name in context.inputs:
            config = AutoConfig.from_pretrained(context.inputs[name] / "model")
            check_model(settings.trainer, config, max_len=longest, aux_loss_coef=balanced.get(name, 0.0))


def _train(
    context: StageContext,
    job: Job,
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
    from rlhf_core.rollout.evaluation import Evaluator
    from rlhf_core.rollout.reward_sources import RewardSources
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler
    from rlhf_core.training.rank import start_trainers
    from rlhf_core.training.rl_loop import PpoRun
    from rlhf_core.training.rl_ranks import RL_TRAINER, RlRanks
    from rlhf_core.training.rl_rollout import Rollouts

    settings: PpoSettings = context.settings
    cluster, events = context.run.cluster, context.events
    events.phase("starting ranks and sampler")
    with ExitStack() as groups:
        scratch = Path(job.scratch)
        sources = groups.enter_context(RewardSources(settings.reward, scratch))
        evaluator = Evaluator(
            settings.evaluation,
            eval_prompts,
            tokenizer,
            max_new_tokens=settings.rollout.max_new_tokens,
            seed=settings.seed,
            scratch=scratch,
        )
        groups.enter_context(evaluator)
        groups.enter_context(ray_session(cluster, actors=settings.trainer.ranks + 1))
        # The sampler starts while the trainers do.
        policy = context.inputs["policy"] / "model"
        sampler, starting = start_sampler(policy, settings.sampler, events=events.path, cluster=cluster)
        groups.callback(sampler.close)
        trainers = start_trainers(RL_TRAINER, job, settings.trainer, cluster)
        groups.callback(trainers.close)
        trainers.call("load", timeout_s=start_limit(cluster))
        wait_for_sampler(sampler, starting, cluster)
        ranks = RlRanks(trainers, settings)
        rollouts = Rollouts(
            settings=settings,
            ranks=ranks,
            models=frozenset({"reward", "process"} & job.manifests.keys()),
            sampler=sampler,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(policy, tokenizer),
            prompts=prompts,
            mix=mix,
            sources=sources,
        )
        run = PpoRun(
            job=job,
            ranks=ranks,
            rollouts=rollouts,
            evaluator=evaluator,
            history=history,
            store=context.store,
            lease=context.lease,
            start_timeout_s=start_limit(cluster),
            dump=_dump(context, job),
        )
        measured = run.run()
        events.phase("exporting")
        facts = export_model(trainers, context.files, timeout_s=start_limit(cluster))
    return measured, facts


def _dump(context: StageContext, job: Job) -> RolloutDump | None:
    """Where the rollouts of this run go; stages/replay.py reads what is written of the run."""
    if not context.settings.dump_rollouts:
        return None
    dump = RolloutDump(context.store, context.stage, context.key)
    dump.start(
        {
            "settings": context.settings.model_dump(mode="json"),
            "inputs": {name: manifest.model_dump(mode="json") for name, manifest in context.manifests.items()},
            "tokens": job.tokens,
        }
    )
    return dump


PPO = Stage(name="ppo", version=5, module="stages.ppo", settings=PpoSettings, pool="gpu", run=ppo)

if __name__ == "__main__":
    from stages.runner import main

    main(PPO)
