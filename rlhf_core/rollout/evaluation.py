"""Evaluation on held-out prompts: the greedy response and several samples of each, verified, of all and by source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.algorithms.pass_at_k import majority, pass_at_k
from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.rl import EvaluationSettings
from rlhf_core.rollout import verifiers
from rlhf_core.rollout.outcomes import Failed, Outcome, Response, Scored
from rlhf_core.rollout.prompts import Prompt, completion_text, greedy_requests, rollout_requests
from rlhf_core.rollout.reward_sources import RewardSources
from rlhf_core.rollout.sample import Sample, SampleRequest

Generate = Callable[[Sequence[SampleRequest]], list[Sample]]


@dataclass(frozen=True)
class Answer:
    """A response to a held-out prompt. scores: by verifier; one that failed, ran out of time say, gives 0 and leaves
    its reason in `failed`. unparsable: no answer was found in it. vote: what a majority is of."""

    text: str
    tokens: int
    truncated: bool
    scores: Mapping[str, float]
    vote: str = ""
    unparsable: bool = False
    failed: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """metrics: by name, with /<source> behind those of a source. greedy: the response to each prompt."""

    metrics: dict[str, float]
    greedy: list[Answer]


class Evaluator:
    """Asks for responses to the same prompts each time, and verifies them. To be closed.

    The samples' seeds are a function of `seed` and the prompt, the same in each evaluation.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        *,
        max_new_tokens: int,
        seed: int,
        scratch: Path,
    ):
        self.settings, self.prompts = settings, prompts
        self._tokenizer, self._max_new_tokens, self._seed = tokenizer, max_new_tokens, seed
        wanted = RewardSettings.model_validate({settings.verifier: 1.0, "sandbox": settings.sandbox})
        self._verifiers = RewardSources(wanted, scratch)

    def run(self, generate: Generate, stop_token_ids: tuple[int, ...]) -> Evaluation:
        """Of the weights that the sampler holds."""
        n, limits = self.settings.samples_per_prompt, self._limits(stop_token_ids)
        greedy = self._answers(generate(greedy_requests(self.prompts, **limits)), 1)
        sampled: list[list[Answer]] = []
        if n:
            # Step 0 has no rollout: its seeds are the evaluations' own.
            requests = rollout_requests(
                self.prompts,
                samples_per_prompt=n,
                temperature=self.settings.temperature,
                seed=self._seed,
                step=0,
                **limits,
            )
            sampled = self._answers(generate(requests), n)
        first = [own[0] for own in greedy]
        sources = [prompt.source for prompt in self.prompts]
        return Evaluation(evaluation_metrics(first, sampled, sources, self.settings), first)

    def shown(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        """A table's rows: some prompts, evenly spaced in the set and the same each time, and their greedy responses."""
        verifier, total = self.settings.verifier, len(self.prompts)
        count = min(self.settings.shown_prompts, total)
        named = any(prompt.source is not None for prompt in self.prompts)
        pairs = [(self.prompts[at], evaluation.greedy[at]) for at in (n * total // count for n in range(count))]
        return [
            {
                "prompt": prompt.text,
                "label": prompt.label,
                **({"source": prompt.source or ""} if named else {}),
                "response": answer.text,
                "score": answer.scores[verifier],
                "tokens": answer.tokens,
                "truncated": answer.truncated,
            }
            for prompt, answer in pairs
        ]

    def close(self) -> None:
        self._verifiers.close()

    def __enter__(self) -> "Evaluator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _limits(self, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
        return {"max_new_tokens": self._max_new_tokens, "stop_token_ids": stop_token_ids}

    def _answers(self, samples: Sequence[Sample], each: int) -> list[list[Answer]]:
        """Of each prompt its `each` responses."""
        texts = [completion_text(self._tokenizer, sample.token_ids) for sample in samples]
        prompts = [prompt for prompt in self.prompts for _ in range(each)]
        responses = [
            Response(prompt.text + text, prompt.text, text, prompt.label)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        outcomes = self._verifiers.score(responses)
        answers = [
            self._answer(sample, text, outcome) for sample, text, outcome in zip(samples, texts, outcomes, strict=True)
        ]
        return [answers[at : at + each] for at in range(0, len(answers), each)]

    def _answer(self, sample: Sample, text: str, outcomes: Mapping[str, Outcome]) -> Answer:
        verifier = self.settings.verifier
        chosen = outcomes[verifier]
        return Answer(
            text=text,
            tokens=len(sample.token_ids),
            truncated=sample.finish_reason == "length",
            scores={name: 0.0 if isinstance(one, Failed) else one.value for name, one in outcomes.items()},
            vote=verifiers.answer(text, verifier),
            unparsable=isinstance(chosen, Scored) and bool(chosen.extra.get("unparsable")),
            failed=chosen.reason if isinstance(chosen, Failed) else None,
        )


def evaluation_metrics(
    greedy: Sequence[Answer],
    sampled: Sequence[Sequence[Answer]],
    sources: Sequence[str | None],
    settings: EvaluationSettings,
) -> dict[str, float]:
    """Of all prompts, and of those of each source that is named. greedy: a response for each prompt; sampled: n for
    each, or nothing."""
    metrics = _metrics(greedy, sampled, settings)
    for source in sorted({source for source in sources if source is not None}):
        own = [number for number, one in enumerate(sources) if one == source]
        part = _metrics([greedy[i] for i in own], [sampled[i] for i in own] if sampled else [], settings)
        metrics |= {f"{name}/{source}": value for name, value in part.items()}
    return metrics


def check_best_metric(metric: str | None, prompts: Sequence[Prompt]) -> None:
    """Raises SettingsError for a metric of a source that the held-out prompts do not have."""
    if metric is None or "/" not in metric:
        return
    source = metric.partition("/")[2]
    known = sorted({prompt.source for prompt in prompts if prompt.source is not None})
    if source not in known:
        has = f"have the sources {', '.join(known)}" if known else "name no sources: data.eval has one alone"
        raise SettingsError(f"best_metric {metric!r}: the held-out prompts {has}; give one of them, or leave it out")


def _metrics(
    greedy: Sequence[Answer], sampled: Sequence[Sequence[Answer]], settings: EvaluationSettings
) -> dict[str, float]:
    verifier = settings.verifier
    every = [*greedy, *(answer for own in sampled for answer in own)]
    measured = {f"{name}_match": _mean([answer.scores[name] for answer in greedy]) for name in greedy[0].scores}
    metrics = {"prompts": float(len(greedy)), **measured, **_lengths(greedy, "greedy")}
    if sampled:
        scores = [[(answer.scores[verifier], answer.vote) for answer in own] for own in sampled]
        metrics |= sampled_metrics(scores, settings.ks)
        metrics |= _lengths([answer for own in sampled for answer in own], "sampled")
    if verifier == "math":
        reasons = [answer.failed for answer in every if answer.failed is not None]
        metrics |= {f"failed/{reason}": float(reasons.count(reason)) for reason in ("timeout", "memory", "error")}
        metrics["failed/label"] = float(reasons.count("unparsable"))
        metrics["unparsable"] = _mean([answer.unparsable for answer in every])
    return metrics


def sampled_metrics(samples: Sequence[Sequence[tuple[float, str]]], ks: Sequence[int]) -> dict[str, float]:
    """Means over prompts of pass@k (unbiased), mean@n and majority@n.

    samples: for each prompt its n samples, (score, vote). Right is a score of at least 1; the majority is that of
    equal votes, and the score of the first of them counts.
    """
    n = len(samples[0])
    right = [sum(score >= 1.0 for score, _ in own) for own in samples]
    return {
        f"mean@{n}": _mean([score for own in samples for score, _ in own]),
        f"majority@{n}": _mean([majority([t for _, t in own], [s for s, _ in own]) for own in samples]),
        **{f"pass@{k}": _mean([pass_at_k(n, c, k) for c in right]) for k in ks},
    }


def _lengths(answers: Sequence[Answer], which: str) -> dict[str, float]:
    return {
        f"response_tokens_{which}": _mean([answer.tokens for answer in answers]),
        f"truncated_{which}": _mean([answer.truncated for answer in answers]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
