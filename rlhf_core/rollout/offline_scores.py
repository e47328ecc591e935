"""Rewards of responses that are there already, from sources that read text and models that read tokens, mixed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.config.rewards import RewardSettings
from rlhf_core.data.batches import chunks
from rlhf_core.rollout.drawings import Progress
from rlhf_core.rollout.outcomes import Outcome
from rlhf_core.rollout.prompts import Prompt, completion_text, sampled_response
from rlhf_core.rollout.reward_sources import RewardSources, Settled, settle
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.rollout.token_scores import Sequences

SCORED_AT_ONCE = 64  # batches of the reward models in a call; the sources that read text get as many responses


@dataclass(frozen=True, eq=False)
class Answer:
    """A response to a prompt: token ids (R,). group: those of one are dropped together (reward.on_failure)."""

    prompt: Prompt
    ids: np.ndarray
    group: int


@dataclass(frozen=True)
class Scores:
    """Of each answer: its text without special tokens, the mix of its rewards, None where its group was dropped, and
    each source's value as it is weighted. metrics: as `settle` gives them."""

    texts: list[str]
    totals: list[float | None]
    values: list[dict[str, float]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class OfflineScorer:
    """models: the reward models' values of token sequences; None without one. batch_size: theirs."""

    settings: RewardSettings
    mix: RewardMix
    sources: RewardSources
    models: Callable[[Sequences], list[dict[str, float]]] | None
    tokenizer: Any
    batch_size: int

    def score(self, answers: Sequence[Answer], progress: Progress) -> Scores:
        """Raises RewardError where a source failed and reward.on_failure is `fail`."""
        texts = [completion_text(self.tokenizer, one.ids.tolist()) for one in answers]
        outcomes: list[dict[str, Outcome]] = []
        by_models: list[dict[str, float]] = []
        for part in chunks(list(zip(answers, texts, strict=True)), SCORED_AT_ONCE * self.batch_size):
            responses = [sampled_response(self.tokenizer, one.prompt, one.ids.tolist(), text) for one, text in part]
            waiting = self.sources.start(responses)
            by_models += self._by_models([one for one, _ in part])
            outcomes += waiting()
            progress(len(outcomes), len(answers))
        settled = settle(outcomes, [one.group for one in answers], self.settings)
        return self._scores(texts, settled, by_models)

    def _scores(self, texts: list[str], settled: Settled, by_models: Sequence[dict[str, float]]) -> Scores:
        raw = [{**models, **values} for models, values in zip(by_models, settled.values, strict=True)]
        totals = [self.mix.total(one) if kept else None for one, kept in zip(raw, settled.kept, strict=True)]
        return Scores(texts, totals, [self.mix.values(one) for one in raw], settled.metrics)

    def _by_models(self, answers: Sequence[Answer]) -> list[dict[str, float]]:
        if self.models is None:
            return [{} for _ in answers]
        return self.models([(np.array(one.prompt.ids, np.int64), one.ids) for one in answers])
