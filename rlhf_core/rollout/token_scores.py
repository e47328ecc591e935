"""Reward and process reward models that score sampled responses offline, in a process of their own, without DeepSpeed.

What is scored is what RL's ranks score: the tokens as they were sampled.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlhf_core.config.sampling import ScorerSettings
from rlhf_core.data.batches import chunks
from rlhf_core.rollout.reward_models import Aggregate, default_device, load_reward_model

# (prompt ids (P,), response ids (R,))
Sequences = Sequence[tuple[np.ndarray, np.ndarray]]

TOKEN_SCORES = "rlhf_core.rollout.token_scores:TokenScores"


class TokenScores:
    """directories: source, "rm" or "prm", -> the Hugging Face directory of its model."""

    def __init__(self, directories: Mapping[str, str], settings: ScorerSettings, aggregate: Aggregate):
        self._batch_size = settings.batch_size
        self._models = {
            source: load_reward_model(
                Path(directory),
                device=default_device(),
                dtype=settings.dtype,
                attention=settings.attention,
                aggregate=aggregate,
            )
            for source, directory in directories.items()
        }

    def score(self, sequences: Sequences) -> list[dict[str, float]]:
        """By source: the reward model's raw score, the process reward model's verdict on the steps as one number."""
        found: list[dict[str, float]] = [{} for _ in sequences]
        for source, model in self._models.items():
            encoded = [model.encode_tokens(prompt, response) for prompt, response in sequences]
            by_length = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
            for numbers in chunks(by_length, self._batch_size):
                judged = model.score([encoded[number] for number in numbers])
                for number, one in zip(numbers, judged, strict=True):
                    found[number][source] = one.reward
        return found
