"""Rows left out, counted by reason."""

from dataclasses import dataclass

from rlhf_core.data.errors import BadRow


@dataclass(frozen=True)
class Dropped:
    """How many items, or rows before they are any, and the first one's row, from 1, with what was wrong there."""

    items: int
    first_row: int
    first: str


def count_drop(dropped: dict[str, Dropped], bad: BadRow, row: int) -> None:
    """Adds one to those of the same reason. `row`: its number, from 1."""
    known = dropped.get(bad.reason, Dropped(0, row, str(bad)))
    dropped[bad.reason] = Dropped(known.items + 1, known.first_row, known.first)
