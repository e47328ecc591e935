"""evaluate: what every policy of the pipeline answers to held-out prompts, greedily and sampled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import POLICIES
from rlhf_core.config.rl import EvaluateSettings
from rlhf_core.tracking.history import markdown_table
from stages.contract import check_length, check_same_tokenizer, described, input_template
from stages.definition import Stage, StageContext, StageResult

SHOWN = 10  # generations in the summary; the artifact holds all


def evaluate(context: StageContext) -> StageResult:
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.data.rows import write_jsonl
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rollout.evaluation import Evaluator
    from rlhf_core.rollout.prompts import load_prompts

    settings: EvaluateSettings = context.settings
    names = policies(context.inputs)
    check_same_tokenizer(**{name: context.manifests[name] for name in names})
    for name in names:
        model = described(name, context.manifests[name])
        length = settings.sampler.max_model_len
        check_length("evaluate.sampler.max_model_len", length, model, context.inputs[name] / "model")
    tokenizer = load_tokenizer(context.inputs[names[0]] / "model")
    template = input_template(context.manifests[names[0]])
    path = context.inputs["data"] / "rows.jsonl"
    prompts, dropped = load_prompts(path, tokenizer, settings.max_prompt_len, template)
    measured: dict[str, dict[str, float]] = {}
    rows = [{"prompt": prompt.text, "label": prompt.label} for prompt in prompts]
    with ExitStack() as stack:
        history = stack.enter_context(closing(context.history()))
        evaluator = Evaluator(
            settings.evaluation,
            prompts,
            tokenizer,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            scratch=context.scratch,
        )
        stack.enter_context(evaluator)
        stack.enter_context(ray_session(context.run.cluster, actors=1))
        for name, evaluation in _evaluations(context, names, tokenizer, evaluator):
            measured[name] = evaluation.metrics
            history.add(0, evaluation.metrics, phase=name)
            for row, answer in zip(rows, evaluation.greedy, strict=True):
                row |= {name: answer.text, **{f"{name} {verifier}": hit for verifier, hit in answer.scores.items()}}
            context.events.progress(len(measured), len(names), f"evaluating {name}")
    write_jsonl(context.files / "samples.jsonl", rows)
    metrics = _metrics(measured, names, dropped)
    return StageResult(context.files, metrics, summary=_summary(measured, metrics, rows[:SHOWN]))


def policies(inputs: Mapping[str, Any]) -> list[str]:
    """The models among a stage's inputs, the starting point first."""
    return [name for name in POLICIES if name in inputs]


def _evaluations(context: StageContext, names: list[str], tokenizer: Any, evaluator: Any) -> Iterator[tuple[str, Any]]:
    """(model's name, its evaluation). One engine: the later models' weights are sent to it."""
    from rlhf_core.cluster.limit import Limit
    from rlhf_core.models.tokenizer import stop_token_ids
    from rlhf_core.rollout.generation import generate
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler

    settings: EvaluateSettings = context.settings
    cluster = context.run.cluster
    limit = Limit(settings.generate_timeout_s, "evaluate.generate_timeout_s")
    context.events.phase("starting the sampler")
    first = context.inputs[names[0]] / "model"
    sampler, starting = start_sampler(first, settings.sampler, events=context.events.path, cluster=cluster)
    try:
        wait_for_sampler(sampler, starting, cluster)
        ask = partial(generate, sampler, settings=settings.sampler, limit=limit)
        for version, name in enumerate(names):
            model = context.inputs[name] / "model"
            if version > 0:
                _send_directory(sampler, model, version, context)
            yield name, evaluator.run(ask, stop_token_ids(model, tokenizer))
    finally:
        sampler.close()


def _send_directory(sampler: Any, model: Path, version: int, context: StageContext) -> None:
    import torch

    from rlhf_core.cluster.limit import start_limit
    from rlhf_core.rollout.weight_transfer import transfer_directory, write_model

    settings: EvaluateSettings = context.settings
    with transfer_directory(context.scratch) as directory:
        index = write_model(model, directory, version, getattr(torch, settings.sampler.dtype))
        sampler.call("update_weights", str(index.path), timeout_s=start_limit(context.run.cluster))


def _metrics(measured: Mapping[str, Mapping[str, float]], names: Sequence[str], dropped: int) -> dict[str, Any]:
    """Each policy's metrics with its name behind them; gain: greedy, of the last policy over the first."""
    first, last = measured[names[0]], measured[names[-1]]
    return {
        "prompts": int(first["prompts"]),
        "prompts_dropped_too_long": dropped,
        **{
            f"{n}/{policy}": value for policy, found in measured.items() for n, value in found.items() if n != "prompts"
        },
        "gain": last["exact_match"] - first["exact_match"],
    }


def _summary(
    measured: Mapping[str, Mapping[str, float]], metrics: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]
) -> str:
    """Every metric of every policy, and some prompts with the greedy responses."""
    names = list(measured)
    shares = ", ".join(f"{name} **{100 * metrics[f'exact_match/{name}']:.1f} %**" for name in names)
    first = f"**Greedy exact match** on {metrics['prompts']} held-out prompts: {shares} "
    table = markdown_table(
        ["metric", *names], [[n, *(measured[name][n] for name in names)] for n in measured[names[0]]]
    )
    answers = [[row["prompt"], row["label"], *(_answer(row, name) for name in names)] for row in shown]
    generations = markdown_table(["prompt", "answer", *names], answers)
    return f"{first}({100 * metrics['gain']:+.1f} points).\n\n{table}\n{generations}"


def _answer(row: Mapping[str, Any], name: str) -> str:
    return f"{'✓' if row[f'{name} exact'] else '✗'} {row[name]}"


EVALUATE = Stage(
    name="evaluate", version=3, module="stages.evaluate", settings=EvaluateSettings, pool="gpu", run=evaluate
)

if __name__ == "__main__":
    from stages.runner import main

    main(EVALUATE)
