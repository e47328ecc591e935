"""Reward and process reward models as functions from text to numbers: what `rlhf serve-reward` serves.

A query is a whole sequence as text, special tokens included, as OpenRLHF's clients send it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_core.algorithms.process_reward import right_probability
from rlhf_core.config.base import SettingsError
from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import DataError, TokenError
from rlhf_core.models.process_scorer import PROCESS_REWARD, load_process_scorer
from rlhf_core.models.scorer import load_scorer
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.rollout.outcomes import one_line
from rlhf_core.rollout.rewards import solution_verdict
from rlhf_core.rollout.step_scores import judged_response

Aggregate = Literal["min", "mean", "last", "product"]


class QueryError(ValueError):
    """A query that the model cannot read. One line."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """ids: (T,). places: where scores are read, for a reward model the last position."""

    ids: np.ndarray
    places: Sequence[int]


@dataclass(frozen=True)
class Judged:
    """reward: what the protocol calls so. steps: the probability that each step is right, None of a reward model."""

    reward: float
    steps: list[float] | None = None


class TextScorer(Protocol):
    """What a service needs of a model."""

    kind: str

    def encode(self, query: str, prompt: str | None) -> Encoded:
        """Raises QueryError. May be called in a thread of its own."""
        ...

    def score(self, encoded: Sequence[Encoded]) -> list[Judged]: ...


class RewardModel(TextScorer, Protocol):
    def encode_tokens(self, prompt: np.ndarray, response: np.ndarray) -> Encoded:
        """Of a sampled response, as RL's ranks judge it."""
        ...


class OutcomeModel:
    """A reward model: the score at the end of the sequence, where it was trained to give one.

    normalize: (score - mean) / std, with the held-out statistics in the model's config.json.
    """

    kind = "reward"

    def __init__(self, directory: str, loading: dict[str, Any], device: str, max_tokens: int, normalize: bool):
        self._tokenizer = load_tokenizer(directory)
        self._model = load_scorer(directory, pad_token_id=self._tokenizer.pad_token_id, **loading).to(device).eval()
        self._device, self._max_tokens = device, max_tokens
        self._mean, self._std = _statistics(directory) if normalize else (0.0, 1.0)

    def encode(self, query: str, prompt: str | None) -> Encoded:
        """The end token is added where the query has none."""
        del prompt
        ids = _ids(self._tokenizer, query)
        if not len(ids) or ids[-1] != self._tokenizer.eos_token_id:
            ids = np.append(ids, self._tokenizer.eos_token_id)
        return Encoded(_checked(ids, self._max_tokens), [len(ids) - 1])

    def encode_tokens(self, prompt: np.ndarray, response: np.ndarray) -> Encoded:
        ids = np.concatenate([prompt, response])
        return Encoded(_checked(ids, self._max_tokens), [len(ids) - 1])

    @torch.no_grad()
    def score(self, encoded: Sequence[Encoded]) -> list[Judged]:
        scores: Any = self._model(**_inputs(encoded, self._tokenizer.pad_token_id, self._device))
        rows = zip(scores.double().cpu(), encoded, strict=True)
        return [Judged((float(row[one.places[0]]) - self._mean) / self._std) for row, one in rows]


class ProcessModel:
    """A process reward model: the probabilities that the steps are right, as one number."""

    kind = "process reward"

    def __init__(self, directory: str, loading: dict[str, Any], device: str, max_tokens: int, aggregate: Aggregate):
        self._tokenizer = load_tokenizer(directory)
        self._model = load_process_scorer(directory, tokens=None, **loading).to(device).eval()
        self._device, self._max_tokens, self._aggregate = device, max_tokens, aggregate
        template = self._model.tokens.template
        given: dict[str, Any] = {} if template is None else {"format": "template", "input_template": template}
        self._encoder = Encoder(self._tokenizer, TextSettings(**given), sys.maxsize)

    def encode(self, query: str, prompt: str | None) -> Encoded:
        """The response is what follows the prompt, given as it stands in the query or as it is before its template."""
        if prompt is None:
            raise QueryError("a process reward model needs `prompts`: steps are those of what follows the prompt")
        head = prompt if query.startswith(prompt) else self._rendered(prompt)
        if not query.startswith(head):
            raise QueryError(
                f"the query does not start with its prompt, neither as given nor as {head[:80]!r}; send both rendered"
            )
        prompt_ids, response_ids = (_ids(self._tokenizer, text) for text in (head, query[len(head) :]))
        ids, places = judged_response(prompt_ids, response_ids, self._tokenizer, self._model.tokens)
        return Encoded(_checked(ids, self._max_tokens), places)

    def encode_tokens(self, prompt: np.ndarray, response: np.ndarray) -> Encoded:
        ids, places = judged_response(prompt, response, self._tokenizer, self._model.tokens)
        return Encoded(_checked(ids, self._max_tokens), places)

    def _rendered(self, prompt: str) -> str:
        try:
            (item,) = self._encoder.prompts([{"prompt": prompt}]).items
        except (DataError, TokenError) as error:
            raise QueryError(str(error)) from None
        return self._tokenizer.decode(item.samples[0].ids.tolist(), clean_up_tokenization_spaces=False)

    @torch.no_grad()
    def score(self, encoded: Sequence[Encoded]) -> list[Judged]:
        logits: Any = self._model(**_inputs(encoded, self._tokenizer.pad_token_id, self._device))
        probabilities = right_probability(logits).cpu().numpy()
        steps = [row[list(one.places)].tolist() for row, one in zip(probabilities, encoded, strict=True)]
        return [Judged(solution_verdict(own, self._aggregate), own) for own in steps]


def load_reward_model(
    directory: Path,
    *,
    device: str,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    max_tokens: int | None = None,
    normalize: bool = False,
    aggregate: Aggregate = "min",
) -> RewardModel:
    """The model of a directory that a stage rm or prm made, or OpenRLHF. Raises SettingsError for another one.

    max_tokens: longest query; the model's positions by default.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--model {directory}: {path.name} cannot be read: {error}; give a model's directory"
        ) from None
    most = max_tokens or config.get("max_position_embeddings") or sys.maxsize
    loading = {"dtype": getattr(torch, dtype), "attention": attention}
    process = PROCESS_REWARD in config
    if not process and not any("SequenceClassification" in name for name in config.get("architectures") or ()):
        raise SettingsError(
            f"--model {directory} is no reward model (architectures {config.get('architectures')}) and no process "
            f"reward model (no {PROCESS_REWARD} in its config.json); give the model of a stage rm or prm"
        )
    try:
        if process:
            return ProcessModel(str(directory), loading, device, most, aggregate)
        return OutcomeModel(str(directory), loading, device, most, normalize)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--model {directory} cannot be loaded: {one_line(error)}") from error


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _statistics(directory: str) -> tuple[float, float]:
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    if "mean" not in config or "std" not in config:
        raise SettingsError(f"--normalize: config.json of {directory} has no mean and std; leave it out")
    return float(config["mean"]), float(config["std"])


def _ids(tokenizer: Any, text: str) -> np.ndarray:
    """Of a text with its special tokens written out; padding around it does not count."""
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    kept = np.flatnonzero(ids != tokenizer.pad_token_id)
    return ids[kept[0] : kept[-1] + 1] if len(kept) else ids[:0]


def _checked(ids: np.ndarray, most: int) -> np.ndarray:
    if not len(ids):
        raise QueryError("the query is empty")
    if len(ids) > most:
        raise QueryError(f"the query has {len(ids)} tokens, more than {most}")
    return ids


def _inputs(encoded: Sequence[Encoded], pad_token_id: int, device: str) -> dict[str, Tensor]:
    """(B, T): fill stands behind what is scored, where causal attention keeps it from mattering."""
    ids = np.full((len(encoded), max(len(one.ids) for one in encoded)), pad_token_id, np.int64)
    for row, one in zip(ids, encoded, strict=True):
        row[: len(one.ids)] = one.ids
    input_ids = torch.from_numpy(ids).to(device)
    return {"input_ids": input_ids, "position_ids": torch.arange(ids.shape[1], device=device).expand_as(input_ids)}
