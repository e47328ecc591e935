"""sample: responses of a policy, scored, as a data set that other stages read like one of prepare-data's."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config.sampling import SampleSettings
from rlhf_core.data.rows import Row, read_jsonl, write_jsonl
from rlhf_core.store.keys import sha256_file
from stages.contract import check_models, input_template
from stages.definition import Stage, StageContext, StageResult
from stages.inputs import check_unchanged, code_digests
from stages.ppo import reward_mix
from stages.sample_shown import sample_metrics, sample_report, summary, write_plots

if TYPE_CHECKING:
    from rlhf_core.rollout.drawings import Drawing
    from rlhf_core.rollout.offline_scores import Answer, OfflineScorer, Scores
    from rlhf_core.rollout.prompts import Prompt
    from rlhf_core.rollout.sample import SampleRequest
    from rlhf_core.rollout.step_labels import StepPlan


@dataclass(frozen=True)
class Sampled:
    """What the sampler gave: for each request, prompt by prompt, a drawing; of form steps the plan, and a drawing for
    each of its completions."""

    requests: "list[SampleRequest]"
    drawings: "list[Drawing]"
    plan: "StepPlan | None" = None
    completions: "list[Drawing]" = field(default_factory=list)


def sample(context: StageContext) -> StageResult:
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rollout.prompts import load_prompts
    from rlhf_core.rollout.reward_sources import RewardSources

    settings: SampleSettings = context.settings
    _check_contract(context)
    tokenizer = load_tokenizer(context.inputs["policy"] / "model")
    path = context.inputs["prompts"] / "rows.jsonl"
    template = input_template(context.manifests["policy"])
    prompts, dropped = load_prompts(path, tokenizer, settings.max_prompt_len, template)
    with ExitStack() as stack:
        history = stack.enter_context(closing(context.history()))
        sources = stack.enter_context(RewardSources(settings.reward, context.scratch))
        stack.enter_context(ray_session(context.run.cluster, actors=1))
        # One after the other: on a machine with one GPU there is room for either.
        sampled = _draw(context, tokenizer, prompts)
        scorer = stack.enter_context(_scorer(context, tokenizer, sources))
        context.events.phase("scoring")
        scores = scorer.score(_answers(settings, prompts, sampled), _progress(context, "scoring"))
        made, counts = _rows(context, prompts, sampled, scores, scorer)
        train, held_out = _split(settings, made, read_jsonl(path))
        metrics = sample_metrics(settings, prompts, sampled.drawings, scores, counts)
        metrics |= {"prompts_dropped_too_long": dropped, "rows": len(train), "eval_rows": len(held_out)}
        history.add(0, metrics, phase="data")
    report = sample_report(settings, train, held_out, metrics)
    digests = _write(context, train, held_out, report)
    write_plots(context.files, report, scores)
    data = {"dataset": settings.kind, "form": settings.form, **metrics, "sha256": digests}
    return StageResult(context.files, metrics, data=data, summary=summary(report))


def _check_contract(context: StageContext) -> None:
    """Refuses what would fail once the engines have started."""
    settings: SampleSettings = context.settings
    check_unchanged(context.node, code_digests(context.node, settings), context.key_source["code"])
    scored = ("sample.max_prompt_len + max_new_tokens", settings.max_prompt_len + settings.max_new_tokens)
    sampled = ("sample.sampler.max_model_len", settings.sampler.max_model_len)
    check_models(context.manifests, context.inputs, {"policy": sampled, "reward": scored, "process": scored})


def _progress(context: StageContext, phase: str) -> Callable[[int, int], None]:
    return lambda done, total: context.events.progress(done, total, phase)


# -- sampling -----------------------------------------------------------------------------------------------------


def _draw(context: StageContext, tokenizer: Any, prompts: "Sequence[Prompt]") -> Sampled:
    from rlhf_core.models.tokenizer import stop_token_ids
    from rlhf_core.rollout.prompts import rollout_requests
    from rlhf_core.rollout.step_labels import completion_requests, plan_steps

    settings: SampleSettings = context.settings
    requests = rollout_requests(
        prompts,
        samples_per_prompt=settings.samples_per_prompt,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        step=0,
        stop_token_ids=stop_token_ids(context.inputs["policy"] / "model", tokenizer),
    )
    with _sampler(context) as draw:
        drawings = draw(requests, "sampling")
        if settings.form != "steps":
            return Sampled(requests, drawings)
        responses, truncated = [one.ids for one in drawings], [one.truncated for one in drawings]
        plan = plan_steps(tokenizer, requests, responses, truncated, settings.steps.separator)
        asked = completion_requests(requests, plan.beginnings, settings.steps.completions, settings.seed)
        return Sampled(requests, drawings, plan, draw(asked, "completing"))


@contextmanager
def _sampler(context: StageContext) -> "Iterator[Callable[[Sequence[SampleRequest], str], list[Drawing]]]":
    """The engine as a function of requests and the name of the phase."""
    from rlhf_core.cluster.limit import Limit
    from rlhf_core.rollout.drawings import KeptDrawings, draw
    from rlhf_core.rollout.generation import WAVES, generate
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler

    settings: SampleSettings = context.settings
    cluster, events = context.run.cluster, context.events
    limit = Limit(settings.generate_timeout_s, "sample.generate_timeout_s")
    kept = KeptDrawings(context.store, context.stage, context.key, context.lease)
    part_size = WAVES * settings.sampler.max_num_seqs
    events.phase("starting the sampler")
    policy = context.inputs["policy"] / "model"
    sampler, starting = start_sampler(policy, settings.sampler, events=events.path, cluster=cluster)

    def drawn(requests: "Sequence[SampleRequest]", phase: str) -> "list[Drawing]":
        def ask(part: "Sequence[SampleRequest]") -> Any:
            return generate(sampler, part, settings.sampler, limit)

        events.phase(phase)
        return draw(ask, requests, kept, phase, part_size, _progress(context, phase))

    try:
        wait_for_sampler(sampler, starting, cluster)
        yield drawn
    finally:
        sampler.close()


# -- scoring ------------------------------------------------------------------------------------------------------


@contextmanager
def _scorer(context: StageContext, tokenizer: Any, sources: Any) -> "Iterator[OfflineScorer]":
    """With the reward models, where they have weight, in a process of their own."""
    from rlhf_core.cluster.limit import Limit, start_limit
    from rlhf_core.cluster.workers import WorkerGroup, rank_environment
    from rlhf_core.rollout.offline_scores import OfflineScorer
    from rlhf_core.rollout.token_scores import TOKEN_SCORES

    settings: SampleSettings = context.settings
    roles = {"rm": "reward", "prm": "process"}
    directories = {
        source: str(context.inputs[role] / "model") for source, role in roles.items() if role in context.inputs
    }
    limit = Limit(settings.scorer.timeout_s, "sample.scorer.timeout_s")
    with ExitStack() as stack:
        models = None
        if directories:
            context.events.phase("starting the reward models")
            cluster = context.run.cluster
            group = WorkerGroup(
                "scorer",
                TOKEN_SCORES,
                1,
                events=context.events.path,
                start_timeout_s=cluster.start_timeout_s,
                **rank_environment(),
            )
            stack.callback(group.close)
            aggregate = settings.reward.prm_aggregate
            group.call("__init__", directories, settings.scorer, aggregate, timeout_s=start_limit(cluster))
            models = lambda sequences: group.call("score", sequences, timeout_s=limit)[0]  # noqa: E731
        mix = reward_mix(settings.reward, context.manifests)
        yield OfflineScorer(settings.reward, mix, sources, models, tokenizer, settings.scorer.batch_size)


def _answers(settings: SampleSettings, prompts: "Sequence[Prompt]", sampled: Sampled) -> "list[Answer]":
    """A group is a prompt's samples: they are compared. Of form steps each stands for itself."""
    from rlhf_core.rollout.offline_scores import Answer

    each = settings.samples_per_prompt
    alone = settings.form == "steps"
    return [
        Answer(prompts[number // each], one.ids, group=number if alone else number // each)
        for number, one in enumerate(sampled.drawings)
    ]


# -- rows ---------------------------------------------------------------------------------------------------------


def _rows(
    context: StageContext,
    prompts: "Sequence[Prompt]",
    sampled: Sampled,
    scores: "Scores",
    scorer: "OfflineScorer",
) -> "tuple[list[tuple[Prompt, Row]], Counter[str]]":
    """(the rows without their prompts, beside these, and what came to nothing)."""
    from rlhf_core.rollout.sample_rows import Drawn, make_rows

    settings: SampleSettings = context.settings
    if sampled.plan is not None:
        return _step_rows(context, prompts, sampled, sampled.plan, scores, scorer)
    rows: list[tuple[Prompt, Row]] = []
    counts: Counter[str] = Counter()
    each = settings.samples_per_prompt
    for number, prompt in enumerate(prompts):
        samples = [
            Drawn(scores.texts[n], total, scores.values[n], len(sampled.drawings[n].ids), sampled.drawings[n].truncated)
            for n in range(number * each, (number + 1) * each)
            if (total := scores.totals[n]) is not None
        ]
        made = make_rows(settings, prompt.prompt_id, samples)
        rows += [(prompt, row) for row in made.rows]
        counts.update({**made.counts, "prompts_without_rows": int(not made.rows)})
    return rows, counts


def _step_rows(
    context: StageContext,
    prompts: "Sequence[Prompt]",
    sampled: Sampled,
    plan: "StepPlan",
    scores: "Scores",
    scorer: "OfflineScorer",
) -> "tuple[list[tuple[Prompt, Row]], Counter[str]]":
    from rlhf_core.rollout.offline_scores import Answer
    from rlhf_core.rollout.step_labels import label_steps

    settings: SampleSettings = context.settings
    each, completions = settings.samples_per_prompt, settings.steps.completions
    context.events.phase("scoring completions")
    answers = []
    for number, one in enumerate(sampled.completions):
        beginning = plan.beginnings[number // completions]
        ids = np.concatenate([beginning.ids, one.ids])
        answers.append(Answer(prompts[beginning.of // each], ids, group=number // completions))
    completed = scorer.score(answers, _progress(context, "scoring completions"))
    labelled = label_steps(plan, scores.totals, completed.totals, settings.steps)
    rows = [(prompts[number // each], row) for number, row in labelled.rows]
    counts = Counter(
        {
            **labelled.counts,
            "samples_without_new_steps": len(sampled.drawings) - len(plan.numbers),
            "prompts_without_rows": len(prompts) - len({prompt.prompt_id for prompt, _ in rows}),
            "completions": len(sampled.completions),
            "completions_truncated": sum(one.truncated for one in sampled.completions),
            "completions_failed": int(completed.metrics["reward/failed"]),
        }
    )
    return rows, counts


def _split(
    settings: SampleSettings, made: "Sequence[tuple[Prompt, Row]]", sources: Sequence[Row]
) -> tuple[list[Row], list[Row]]:
    """(rows, held-out rows), with their prompts as the prompts' data set has them. A prompt is on one side."""
    from rlhf_core.data.errors import DataError
    from rlhf_core.data.loading import is_held_out

    copied = ("prompt", "tools", "source", *(("label",) if settings.form == "generations" else ()))
    rows: list[Row] = []
    held_out: list[Row] = []
    for prompt, row in made:
        source = sources[prompt.prompt_id]
        whole = {name: source[name] for name in copied if name in source} | row
        share = settings.eval_share
        (held_out if share is not None and is_held_out(whole, share) else rows).append(whole)
    if not rows or (settings.eval_share is not None and not held_out):
        raise DataError(
            f"sample: {len(made)} rows of form {settings.form} were made, of which {len(held_out)} are held out; both "
            "parts need some: draw more samples, at a higher temperature, or change eval_share or the form's limits"
        )
    return rows, held_out


def _write(context: StageContext, rows: list[Row], held_out: list[Row], report: dict[str, Any]) -> dict[str, str]:
    """Writes the artifact's files; returns {file of rows: SHA-256}."""
    files = context.files
    parts = {"rows.jsonl": rows} | ({"eval.jsonl": held_out} if held_out else {})
    for name, part in parts.items():
        write_jsonl(files / name, part)
    (files / "data_report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
    return {name: sha256_file(files / name) for name in parts}


SAMPLE = Stage(name="sample", version=1, module="stages.sample", settings=SampleSettings, pool="gpu", run=sample)

if __name__ == "__main__":
    from stages.runner import main

    main(SAMPLE)
