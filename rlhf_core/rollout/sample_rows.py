"""From a prompt's scored samples to rows, for every form of the stage sample but `steps`. Pure functions.

Responses that were cut off or are blank make no row but a plain generation: training would give the former an end that
they never had, and refuses the latter.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rlhf_core.config.sampling import PairForm, RejectionForm, SampleSettings
from rlhf_core.data.rows import Row


@dataclass(frozen=True)
class Drawn:
    """A sample. text: without special tokens. score: the mix of rewards. values: each source's, before its weight.
    tokens: of the response, its end included."""

    text: str
    score: float
    values: Mapping[str, float]
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class Made:
    """Rows without their prompt, and how often what came to nothing; the names are the same for all prompts."""

    rows: list[Row]
    counts: Counter[str]


def make_rows(settings: SampleSettings, prompt_id: int, samples: Sequence[Drawn]) -> Made:
    """What becomes of a prompt's samples; with no samples, of a prompt whose group was dropped."""
    whole = [sample for sample in samples if not sample.truncated and sample.text.strip()]
    if settings.form == "generations":
        return Made([_generation(sample) for sample in samples], Counter())
    if settings.form == "best_of_n":
        return Made([_answer(sample) for sample in best_of_n(whole)], Counter())
    if settings.form == "rejection":
        return rejection(whole, settings.rejection)
    return preference_pairs(whole, settings.pairs, [settings.seed, prompt_id])


def best_of_n(samples: Sequence[Drawn]) -> list[Drawn]:
    """The first of those with the highest score; none of none."""
    return [max(samples, key=lambda sample: sample.score)] if samples else []


def rejection(samples: Sequence[Drawn], form: RejectionForm) -> Made:
    """Every different text whose score is at least the threshold, best first, at most max_per_prompt."""
    different = distinct(samples)
    good = [sample for sample in different if reaches(sample.score, form.threshold)]
    kept = sorted(good, key=lambda sample: -sample.score)[: form.max_per_prompt]
    counts = {
        "samples_duplicate": len(samples) - len(different),
        "samples_below_threshold": len(different) - len(good),
        "samples_over_limit": len(good) - len(kept),
    }
    return Made([_answer(sample) for sample in kept], Counter(counts))


def reaches(reward: float, least: float) -> bool:
    """Whether a weighted sum is at least `least`, but for rounding: 0.6 + 0.3 + 0.1 is a whole point."""
    return reward >= least or math.isclose(reward, least, rel_tol=1e-9)


def preference_pairs(samples: Sequence[Drawn], form: PairForm, seed: Sequence[int]) -> Made:
    """Pairs of different texts, the one with the higher score chosen. seed: of which pairs max_per_prompt leaves."""
    different = distinct(samples)
    if form.which == "all":
        candidates = list(combinations(different, 2))
    else:
        by_score = sorted(different, key=lambda sample: -sample.score)
        candidates = [(by_score[0], by_score[-1])] if len(by_score) > 1 else []
    untied = [(one, other) for one, other in candidates if one.score != other.score]
    apart = [_ordered(*pair) for pair in untied if abs(pair[0].score - pair[1].score) >= form.min_margin]
    kept = apart
    if form.max_per_prompt is not None and len(apart) > form.max_per_prompt:
        places = np.random.default_rng(list(seed)).choice(len(apart), form.max_per_prompt, replace=False)
        kept = [apart[place] for place in sorted(places.tolist())]
    counts = {
        "samples_duplicate": len(samples) - len(different),
        "pairs_tied": len(candidates) - len(untied),
        "pairs_below_margin": len(untied) - len(apart),
        "pairs_over_limit": len(apart) - len(kept),
    }
    rows = [
        {"chosen": chosen.text, "rejected": rejected.text, "margin": chosen.score - rejected.score}
        for chosen, rejected in kept
    ]
    return Made(rows, Counter(counts))


def distinct(samples: Iterable[Drawn]) -> list[Drawn]:
    """The first sample of each text."""
    first: dict[str, Drawn] = {}
    for sample in samples:
        first.setdefault(sample.text, sample)
    return list(first.values())


def _ordered(one: Drawn, other: Drawn) -> tuple[Drawn, Drawn]:
    return (one, other) if one.score > other.score else (other, one)


def _answer(sample: Drawn) -> Row:
    return {"response": sample.text, "score": sample.score}


def _generation(sample: Drawn) -> Row:
    return {
        **_answer(sample),
        "rewards": dict(sample.values),
        "tokens": sample.tokens,
        "truncated": sample.truncated,
    }
