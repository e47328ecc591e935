"""evaluate: greedy exact match on held-out prompts, of every policy of the pipeline."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import POLICIES
from rlhf_core.config.rl import EvaluateSettings
from stages.contract import check_length, check_same_tokenizer, described, input_template
from stages.definition import Stage, StageContext, StageResult

SHOWN = 10  # generations in the summary; the artifact holds all


def evaluate(context: StageContext) -> StageResult:
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.data.rows import write_jsonl
    from rlhf_core.models.tokenizer import load_tokenizer
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
    rows = [{"prompt": prompt.text, "label": prompt.label} for prompt in prompts]
    metrics: dict[str, Any] = {"prompts": len(prompts), "prompts_dropped_too_long": dropped}
    with closing(context.history()) as history, ray_session(context.run.cluster, actors=1):
        for number, (name, texts) in enumerate(_completions(context, names, tokenizer, prompts), start=1):
            hits = _score(rows, name, texts)
            metrics[f"exact_match/{name}"] = sum(hits) / len(hits)
            history.add(0, {"exact_match": metrics[f"exact_match/{name}"]}, phase=name)
            context.events.progress(number, len(names), f"evaluating {name}")
    metrics["gain"] = metrics[f"exact_match/{names[-1]}"] - metrics[f"exact_match/{names[0]}"]
    write_jsonl(context.files / "samples.jsonl", rows)
    return StageResult(context.files, metrics, summary=_summary(names, metrics, rows[:SHOWN]))


def policies(inputs: Mapping[str, Any]) -> list[str]:
    """The models among a stage's inputs, the starting point first."""
    return [name for name in POLICIES if name in inputs]


def _completions(context: StageContext, names: list[str], tokenizer: Any, prompts: list[Any]) -> Any:
    """(model's name, a greedy completion for each prompt). One engine: the later models' weights are sent to it."""
    from rlhf_core.models.tokenizer import stop_token_ids
    from rlhf_core.rollout.prompts import completion_text, greedy_requests
    from rlhf_core.rollout.start import start_sampler, wait_for_sampler

    settings: EvaluateSettings = context.settings
    cluster = context.run.cluster
    context.events.phase("starting the sampler")
    first = context.inputs[names[0]] / "model"
    sampler, starting = start_sampler(first, settings.sampler, events=context.events.path, cluster=cluster)
    try:
        wait_for_sampler(sampler, starting, cluster)
        for version, name in enumerate(names):
            if version > 0:
                _send_directory(sampler, context.inputs[name] / "model", version, context)
            stops = stop_token_ids(context.inputs[name] / "model", tokenizer)
            requests = greedy_requests(prompts, max_new_tokens=settings.max_new_tokens, stop_token_ids=stops)
            samples = sampler.call("generate", requests, timeout_s=settings.generate_timeout_s)[0]
            yield name, [completion_text(tokenizer, sample.token_ids) for sample in samples]
    finally:
        sampler.close()


def _send_directory(sampler: Any, model: Path, version: int, context: StageContext) -> None:
    import torch

    from rlhf_core.rollout.weight_transfer import transfer_directory, write_model

    settings: EvaluateSettings = context.settings
    with transfer_directory(context.scratch) as directory:
        index = write_model(model, directory, version, getattr(torch, settings.sampler.dtype))
        sampler.call("update_weights", str(index.path), timeout_s=settings.generate_timeout_s)


def _score(rows: list[dict[str, Any]], name: str, texts: list[str]) -> list[float]:
    from rlhf_core.rollout.verifiers import exact

    hits = [exact(text, row["label"]) for text, row in zip(texts, rows, strict=True)]
    for row, text, hit in zip(rows, texts, hits, strict=True):
        row |= {name: text, f"{name} exact": hit}
    return hits


def _summary(names: list[str], metrics: dict[str, Any], shown: list[dict[str, Any]]) -> str:
    shares = ", ".join(f"{name} **{100 * metrics[f'exact_match/{name}']:.1f} %**" for name in names)
    lines = [
        f"**Greedy exact match** on {metrics['prompts']} held-out prompts: {shares} "
        f"({100 * metrics['gain']:+.1f} points).",
        "",
        f"| prompt | answer |{''.join(f' {name} | |' for name in names)}",
        f"|---|---|{'---|---|' * len(names)}",
    ]
    for row in shown:
        cells = [f"`{row[name]}` | {'✓' if row[f'{name} exact'] else '✗'}" for name in names]
        lines.append(f"| `{row['prompt']}` | `{row['label']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


EVALUATE = Stage(
    name="evaluate", version=2, module="stages.evaluate", settings=EvaluateSettings, pool="gpu", run=evaluate
)

if __name__ == "__main__":
    from stages.runner import main

    main(EVALUATE)
