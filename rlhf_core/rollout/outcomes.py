"""What a source of rewards says of a response: a value, or a failure with a name. Never a zero for a failure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Reason = Literal["timeout", "memory", "error", "unparsable"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Scored:
    """value: the reward before its weight. score: what groups are filtered by, None for the value itself.

    extra: further numbers for the metrics, e.g. {"timeout": 1.0} where the response's code ran out of time.
    """

    value: float
    score: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """There is no value. message: one line for the log."""

    reason: Reason
    message: str


Outcome = Scored | Failed


@dataclass(frozen=True)
class Response:
    """What a source judges.

    query: the whole sequence as text, special tokens included. prompt: the data set's, as text.
    completion: the response without special tokens. label: the prompt's.
    """

    query: str
    prompt: str
    completion: str
    label: str


def finite(outcome: Outcome) -> Outcome:
    """A value or score that is no number fails instead."""
    if isinstance(outcome, Failed) or (math.isfinite(outcome.value) and math.isfinite(outcome.score or 0.0)):
        return outcome
    return Failed("unparsable", f"the value is {outcome.value}, the score {outcome.score}")


def one_line(text: object, limit: int = 300) -> str:
    """For messages: blanks joined, and no longer than `limit` characters."""
    words = " ".join(str(text).split())
    return words if len(words) <= limit else f"{words[: limit - 3]}..."
