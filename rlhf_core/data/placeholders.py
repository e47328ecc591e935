"""Steps in token sequences: a placeholder id behind each step's last token, where a process reward model judges it.

The id is put between tokens and never passes through the tokenizer, so it cannot merge with the text around it.
Training data and new solutions go through the same `place_steps`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlhf_core.config.supervised import PrmSettings
from rlhf_core.data.errors import BadRow, TokenError


def place_steps(
    ids: Sequence[int] | np.ndarray, step_ends: Sequence[int], placeholder: int
) -> tuple[np.ndarray, list[int]]:
    """(ids with a placeholder behind each step, the placeholders' positions).

    step_ends: for each step, how many of `ids` there are up to its last token, that one included; rising. Without the
    placeholders, at these positions, the result is `ids` again. Raises BadRow where two steps end in one token.
    """
    if any(later <= earlier for earlier, later in pairwise(step_ends)):
        raise BadRow("two steps end in one token", f"step ends {list(step_ends)}")
    placed = np.insert(np.asarray(ids, np.int32), list(step_ends), placeholder)
    return placed, [end + number for number, end in enumerate(step_ends)]


def without_steps(ids: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """The ids that `place_steps` was given."""
    return np.delete(ids, list(positions))


def split_steps(solution: str, separator: str) -> list[str]:
    """The steps of a new solution; blank ones are none. Raises TokenError for a separator that is empty."""
    if not separator:
        raise TokenError("without a separator a solution cannot be split into steps; set `separator`")
    return [step for step in solution.split(separator) if step.strip()]


def step_ends(tokenizer: Any, response_ids: Sequence[int], steps: Sequence[str]) -> list[int]:
    """For each step of a generated response, how many of its ids there are up to the step's last token.

    The ids are those that were generated: encoding the text again might give others. response_ids are given without
    the end token. Raises TokenError where the decoded response does not hold the steps in order.
    """

    def text(count: int) -> str:
        return tokenizer.decode(
            list(response_ids[:count]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    whole = text(len(response_ids))
    ends, at = [], 0
    for number, step in enumerate(steps, start=1):
        place = whole.find(step, at)
        if place < 0:
            raise TokenError(f"step {number} ({step[:40]!r}) is not in the response behind the step before it")
        at = place + len(step)
        counts = range(len(response_ids) + 1)
        ends.append(bisect_left(counts, True, key=lambda count, end=at: text(count)[:end] == whole[:end]))
    return ends


def single_id(tokenizer: Any, token: str, setting: str) -> int:
    """The one id of a token. Raises TokenError where the tokenizer makes several ids, or an unknown one, of it."""
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise TokenError(
            f"{setting} {token!r} is {len(ids)} tokens ({tokenizer.convert_ids_to_tokens(ids)}) and must be one of the "
            "vocabulary; give a token that the tokenizer has"
        )
    return ids[0]


def step_labels(steps: Sequence[str], labels: Sequence[Any], settings: PrmSettings) -> tuple[float | None, ...]:
    """For each step what is learned at its placeholder; None where it has no label.

    Hard: the index in reward_tokens, given by true or 1 (index 0), false or 0 (index 1), or the token itself. Soft:
    the probability that the step is right. Raises TokenError for anything else, and where no step has a label.
    """
    if len(steps) != len(labels):
        raise TokenError(
            f"{len(steps)} steps and {len(labels)} labels; give one label a step, null for none",
            "as many labels as steps are needed",
        )
    empty = [number for number, step in enumerate(steps, start=1) if not step.strip()]
    if empty:
        raise TokenError(f"step {empty[0]} is empty; leave it and its label out", "a step is empty")
    read = tuple(_label(label, settings) for label in labels)
    if all(label is None for label in read):
        raise TokenError("no step has a label; leave the row out")
    return read


def _label(label: Any, settings: PrmSettings) -> float | None:
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return None
    if settings.labels == "hard" and isinstance(label, str) and label in settings.reward_tokens:
        return float(settings.reward_tokens.index(label))
    if isinstance(label, bool | int | float) and 0 <= label <= 1:
        if settings.labels == "soft":
            return float(label)
        if label in (0, 1):
            return 1.0 - label
    allowed = f"true, false or one of {', '.join(settings.reward_tokens)}" if settings.labels == "hard" else "0 to 1"
    raise TokenError(
        f"label {label!r} with labels: {settings.labels}; give {allowed}, or null for none",
        "a label that is not allowed",
    )
