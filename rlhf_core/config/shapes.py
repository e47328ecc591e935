"""The shapes that rows of each data set may have: which columns make one, under the names that `columns` maps to."""

from dataclasses import dataclass
from typing import Literal, get_args

DatasetKind = Literal["sft", "pairs", "labelled", "steps", "prompts", "eval"]

ShapeName = Literal[
    "prompt",
    "alpaca",
    "messages",
    "text",
    "conversation_pairs",
    "completions",
    "markers",
]


@dataclass(frozen=True)
class Shape:
    """`required` columns have a value in every row; `optional` ones where the row has something to say."""

    name: ShapeName
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


_AROUND = ("system", "tools")
_ALPACA = ("input", "history", *_AROUND)


def _prompted(answer: tuple[str, ...], alpaca_answer: tuple[str, ...], extra: tuple[str, ...] = ()) -> list[Shape]:
    """What every data set has in common: the prompt is a column, an Alpaca instruction, or a conversation so far."""
    return [
        Shape("prompt", ("prompt", *answer), (*_AROUND, *extra)),
        Shape("alpaca", ("instruction", *alpaca_answer), (*_ALPACA, *extra)),
    ]


SHAPES: dict[DatasetKind, tuple[Shape, ...]] = {
    "sft": (
        *_prompted(("response",), ("output",)),
        Shape("messages", ("messages",), _AROUND),
        Shape("text", ("text",)),
    ),
    "pairs": (
        *_prompted(("chosen", "rejected"), ("chosen", "rejected"), ("margin",)),
        Shape("messages", ("messages", "chosen", "rejected"), (*_AROUND, "margin")),
        Shape("conversation_pairs", ("chosen", "rejected"), (*_AROUND, "margin")),
    ),
    "labelled": (
        *_prompted(("response", "label"), ("output", "label")),
        Shape("messages", ("messages", "label"), _AROUND),
    ),
    "steps": (
        Shape("prompt", ("prompt", "steps", "labels")),
        Shape("completions", ("prompt", "completions", "labels")),
        Shape("markers", ("input", "label"), ("prompt",)),
    ),
    "prompts": (
        *_prompted(("label",), ("label",), ("data_source",)),
        Shape("messages", ("messages", "label"), (*_AROUND, "data_source")),
    ),
}
SHAPES["eval"] = SHAPES["prompts"]

assert set(SHAPES) == set(get_args(DatasetKind))


def columns_of(kind: DatasetKind) -> tuple[str, ...]:
    """Every name that a column of this data set may be given, in the order of its shapes."""
    return tuple(dict.fromkeys(column for shape in SHAPES[kind] for column in shape.columns))
