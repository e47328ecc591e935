"""Step-labelled solutions, as lists of steps or as one text with a marker behind each step."""

import re
from typing import Any

from rlhf_core.data.errors import BadRow
from rlhf_core.data.messages import is_empty, shown
from rlhf_core.data.rows import Row

_FIRST_STEP = re.compile(r"\bStep 1\b")


def read_steps(steps: Any, labels: Any, column: str) -> Row:
    """A step's label is True or 1 for a right one, 0 or False for a wrong one, a number between them as its
    probability, a reward token as text, or None where it has none.

    Whether a text is one of the stage's reward tokens shows when rows become tokens. Raises BadRow.
    """
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise BadRow(f"column {column} is not a list of strings", shown(steps))
    if not all(steps):
        raise BadRow("a step is empty")
    read = _read_labels(labels)
    if len(read) != len(steps):
        raise BadRow("as many labels as steps are needed", f"{len(steps)} steps and {len(read)} labels")
    return {"steps": steps, "labels": read}


def _read_labels(labels: Any) -> list[bool | float | str | None]:
    """Numbers are of one type: whole ones are verdicts, a fraction makes all of them probabilities."""
    if not isinstance(labels, list):
        raise BadRow(_BAD_LABELS, shown(labels))
    read = [None if is_empty(one) else one for one in labels]
    numbers = [one for one in read if isinstance(one, bool | int | float)]
    # A label such as -100 is somebody's mark for "none"; as a truth value it would be True.
    usable = all(one is None or isinstance(one, bool | int | float | str) for one in read)
    if not usable or not all(0 <= number <= 1 for number in numbers):
        raise BadRow(_BAD_LABELS, shown(labels))
    if all(one is None for one in read):
        raise BadRow("no step has a label")
    number_type = float if any(isinstance(number, float) for number in numbers) else bool
    return [one if one is None or isinstance(one, str) else number_type(one) for one in read]


_BAD_LABELS = "column labels is not a list of booleans, numbers from 0 to 1, reward tokens and nulls"


def read_marked_steps(text: Any, labels: Any, marker: str, prompt: Any = None) -> Row:
    """A canonical row from Math-Shepherd's form (Wang et al. 2023): `text` has a marker at the end of each step.

    `labels` is the same text with "+" or "-" in place of each marker, or a list of them or of what `read_steps` takes.
    Without a prompt, it is what stands before "Step 1". Raises BadRow.
    """
    if not isinstance(text, str):
        raise BadRow("column input is not text", shown(text))
    *pieces, rest = text.split(marker)
    if not pieces:
        raise BadRow("no step is marked", f"{marker!r} is not in the text; set step_marker to what ends a step")
    if rest.strip():
        raise BadRow("text after the last step's marker", shown(rest))
    verdicts = _verdicts_in(labels, [*pieces, rest]) if isinstance(labels, str) else labels
    if isinstance(verdicts, list):
        verdicts = [_SIGNS.get(one, one) if isinstance(one, str) else one for one in verdicts]
    if is_empty(prompt):
        prompt, pieces[0] = _cut_prompt(pieces[0])
    elif not isinstance(prompt, str):
        raise BadRow("column prompt is not text", shown(prompt))
    else:
        pieces[0] = pieces[0].removeprefix(prompt)
    return {"prompt": prompt, **read_steps([piece.strip() for piece in pieces], verdicts, "input")}


_SIGNS = {"+": True, "-": False}


def _verdicts_in(labels: str, pieces: list[str]) -> list[str]:
    """The characters that stand in `labels` between the pieces of the marked text."""
    verdicts: list[str] = []
    at = 0
    for number, piece in enumerate(pieces):
        if not labels.startswith(piece, at):
            raise BadRow("label is not the text with + or - for each marker", f"they part in step {number + 1}")
        at += len(piece)
        if number < len(pieces) - 1:
            verdicts.append(labels[at : at + 1])
            at += 1
    if at != len(labels) or set(verdicts) - set(_SIGNS):
        raise BadRow("label is not the text with + or - for each marker", shown(labels[-20:]))
    return verdicts


def _cut_prompt(first: str) -> tuple[str, str]:
    """(prompt, first step) of the text before the first marker."""
    found = _FIRST_STEP.search(first)
    if found is None or not first[: found.start()].strip():
        raise BadRow('no prompt before "Step 1"', f"{shown(first)}; give it in a column prompt")
    return first[: found.start()].strip(), first[found.start() :]
