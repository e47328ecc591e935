"""Scores of the steps of new solutions, from the directory of a trained process reward model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.algorithms.process_reward import right_probability
from rlhf_core.config.supervised import PrmSettings, TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.samples import Sample
from rlhf_core.models.process_scorer import load_process_scorer
from rlhf_core.models.tokenizer import load_tokenizer

Prompt = str | Sequence[dict[str, Any]]  # a user's turn, or messages


class StepScorer:
    """The probability that each step of a solution is right, given the prompt and the steps before it.

    Solutions are encoded as training encoded them, from what the model's config.json and tokenizer say.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention: str = "sdpa",
    ):
        self.model = load_process_scorer(str(directory), tokens=None, dtype=dtype, attention=attention)
        self.model.to(device).eval()
        self.device = device
        self.tokenizer = load_tokenizer(directory)
        tokens = self.model.tokens
        given: dict[str, Any] = (
            {} if tokens.template is None else {"format": "template", "input_template": tokens.template}
        )
        positions = self.model.lm.config.get_text_config().to_dict().get("max_position_embeddings") or sys.maxsize
        self._encoder = Encoder(self.tokenizer, TextSettings(**given), positions)
        # Of the settings of training, those that say how steps are encoded.
        self._settings = PrmSettings.model_construct(
            placeholder_token=self.tokenizer.decode([tokens.placeholder]),
            reward_tokens=tuple(self.tokenizer.decode([token]) for token in tokens.verdicts),
            separator=tokens.separator,
            labels="hard",
        )

    def __call__(
        self, prompts: Sequence[Prompt], steps: Sequence[Sequence[str]], batch_size: int = 16
    ) -> list[list[float]]:
        """One list for each solution, one probability for each of its steps; no step, no number.

        A solution's scores do not depend on what it is batched with. Raises ValueError for a solution that is longer
        than the model's positions, or whose steps end within one token.
        """
        samples = self._encoded(prompts, steps)
        scores: list[list[float]] = [[] for _ in prompts]
        by_length = sorted(samples, key=lambda number: len(samples[number]))
        for start in range(0, len(by_length), batch_size):
            numbers = by_length[start : start + batch_size]
            for number, found in zip(numbers, self._scores([samples[number] for number in numbers]), strict=True):
                scores[number] = found
        return scores

    def _encoded(self, prompts: Sequence[Prompt], steps: Sequence[Sequence[str]]) -> dict[int, Sample]:
        """The samples of the solutions that have a step, by number."""
        numbers = [number for number, own in enumerate(steps) if own]
        # The labels only say that there are some: nothing is learned here.
        rows = [
            {"prompt": prompt, "steps": list(own), "labels": [True] * len(own)}
            for prompt, own in zip(prompts, steps, strict=True)
            if own
        ]
        if not rows:
            return {}
        encoded = self._encoder.steps(rows, self._settings)
        dropped = sorted(set(range(len(rows))) - set(encoded.row_ids))
        if dropped:
            raise ValueError(f"solution {numbers[dropped[0]] + 1} cannot be scored: {encoded.report.drops_in_words()}")
        return {numbers[row]: item.samples[0] for row, item in zip(encoded.row_ids, encoded.items, strict=True)}

    @torch.no_grad()
    def _scores(self, samples: Sequence[Sample]) -> list[list[float]]:
        # Fill stands behind what is scored, where causal attention keeps it from mattering.
        ids = np.full((len(samples), max(map(len, samples))), self.tokenizer.pad_token_id, np.int64)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample)] = sample.ids
        input_ids = torch.from_numpy(ids).to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(input_ids)
        logits_RLK: Any = self.model(input_ids, position_ids=positions)
        probabilities = right_probability(logits_RLK).cpu().numpy()
        return [
            row[: len(sample)][sample.weights > 0].tolist() for row, sample in zip(probabilities, samples, strict=True)
        ]


def score_steps(directory: str | Path, prompts: Sequence[Prompt], steps: Sequence[Sequence[str]]) -> list[list[float]]:
    """`StepScorer`'s probabilities, in float32 on the CPU."""
    return StepScorer(directory)(prompts, steps)
