"""The common shapes of rows: which one a source has, and each of its rows as a canonical row of its data set.

Canonical rows, whose messages are those of rlhf_core/data/messages.py:

    sft            {"messages"}, with "tools" where given | {"prompt": str, "response": str} | {"text": str}
    pairs          {"prompt", "chosen", "rejected"}, with "margin" and "tools" where given
    labelled       {"prompt", "response", "label": bool}, with "tools" where given
    steps          {"prompt", "steps": [str], "labels": [bool | float | reward token | None]}
    prompts, eval  {"prompt", "label": str}, with "source" and "tools" where given

A prompt or response is text, or a list of messages; within a row all are of one kind.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.shapes import SHAPES, DatasetKind, Shape
from rlhf_core.data.errors import BadRow, DataError
from rlhf_core.data.messages import (
    NO_VISION,
    Message,
    is_empty,
    looks_like_messages,
    read_messages,
    read_tools,
    says_from,
    shown,
    unread_keys,
)
from rlhf_core.data.rows import Row
from rlhf_core.data.steps import read_marked_steps, read_steps

Side = str | list[Message]

# Where people put what we call by these names: what an error message suggests.
_OTHER_NAMES = {
    "prompt": ("question", "query", "instruction", "input", "problem"),
    "response": ("answer", "output", "completion", "solution", "target"),
    "messages": ("conversation", "dialog", "dialogue"),
    "label": ("answer", "solution", "target", "ground_truth"),
    "chosen": ("accepted", "preferred", "response_chosen"),
    "rejected": ("dispreferred", "response_rejected"),
}
_VISION = ("image", "images", "video", "videos", "audio", "audios")
# Our columns that may hold messages.
_SPOKEN = ("messages", "prompt", "response", "output", "chosen", "rejected")


def check_mapped(rows: Iterable[Row], columns: Mapping[str, str]) -> None:
    """Raises DataError, without the source's name, for a column that `columns` maps and that no row has."""
    there = dict.fromkeys(name for row in rows for name in row)
    absent = [f"{theirs} (for {ours})" for ours, theirs in columns.items() if theirs not in there]
    if absent:
        raise DataError(f"has no column {', '.join(absent)}, which `columns` maps; it has {', '.join(sorted(there))}")


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row under our names; `columns` maps ours to the source's. `conversations` is `messages` to us."""
    taken = {*columns.values(), *columns}
    rest = {name: value for name, value in row.items() if name not in taken}
    if "messages" not in columns and is_empty(rest.get("messages")) and "conversations" in rest:
        rest["messages"] = rest.pop("conversations")
    return rest | {ours: row.get(theirs) for ours, theirs in columns.items()}


@dataclass(frozen=True)
class Recognised:
    """`described` is what the report calls the shape; `unused` and `unused_keys` are the columns and the keys of
    messages that are not read."""

    shape: Shape
    described: str
    unused: tuple[str, ...]
    unused_keys: tuple[str, ...]


def recognise(
    rows: Iterable[Row], kind: DatasetKind, columns: Iterable[str] = (), shape: str | None = None
) -> Recognised:
    """Which shape renamed rows have, from the columns that hold something in any of them.

    `columns` are ours that the user mapped, `shape` is the one that the user named. Raises DataError, without the
    source's name, where none fits, or several do.
    """
    rows = list(rows)
    present = list(dict.fromkeys(name for row in rows for name, value in row.items() if not is_empty(value)))
    fitting = [one for one in SHAPES[kind] if set(one.required) <= set(present) and set(columns) <= set(one.columns)]
    # A shape that another one extends, as pairs of whole conversations beside a prompt, is not meant.
    fitting = [one for one in fitting if not any(set(one.required) < set(other.required) for other in fitting)]
    if shape is not None:
        fitting = [one for one in SHAPES[kind] if one.name == shape]
        missing = [name for one in fitting for name in one.required if name not in present]
        if missing:
            raise DataError(f"has no column {', '.join(missing)}, which shape {shape} needs; {_found(present, kind)}")
    if not fitting:
        raise DataError(f"fits no shape of this data set ({_needed(SHAPES[kind])}); {_found(present, kind)}")
    if len(fitting) > 1:
        raise DataError(
            f"fits several shapes ({_needed(fitting)}); say which is meant, e.g. shape: {fitting[0].name}, or map "
            f"columns"
        )
    (found,) = fitting
    unused = tuple(name for name in present if name not in found.columns)
    spoken = [name for name in found.columns if name in _SPOKEN]
    keys = dict.fromkeys(key for row in rows for name in spoken for key in unread_keys(row.get(name)))
    return Recognised(found, _described(found, rows), unused, tuple(keys))


def _needed(shapes: Iterable[Shape]) -> str:
    return "; ".join(f"{shape.name}: {' + '.join(shape.required)}" for shape in shapes)


def _found(present: list[str], kind: DatasetKind) -> str:
    """What there is, and a mapping that would make the first shape of it where the names give a hint."""
    wanted = SHAPES[kind][0].required
    hint = {
        ours: next((name for name in (ours, *_OTHER_NAMES.get(ours, ())) if name in present), "...") for ours in wanted
    }
    shown_hint = ", ".join(f"{ours}: {theirs}" for ours, theirs in hint.items() if ours != theirs)
    return f"it has {', '.join(sorted(present)) or 'no columns'}; map them, e.g. columns: {{{shown_hint}}}"


def _described(shape: Shape, rows: list[Row]) -> str:
    """The shape's name, with the form of its conversations where it has some."""
    for row in rows:
        for name in ("messages", "prompt", "chosen"):
            value = row.get(name)
            if name in shape.required and looks_like_messages(value):
                assert isinstance(value, list)
                return f"{shape.name} (ShareGPT's from/value)" if says_from(value) else f"{shape.name} (role/content)"
    return shape.name


def convert(row: Row, kind: DatasetKind, shape: Shape, step_marker: str) -> Row:
    """A renamed row as a canonical row. Raises BadRow."""
    missing = [name for name in shape.required if is_empty(row.get(name))]
    if missing:
        raise BadRow(f"nothing in column {', '.join(missing)}")
    if any(not is_empty(row.get(name)) for name in _VISION):
        raise BadRow(NO_VISION, "the row comes with images, video or audio")
    if shape.name == "markers":
        return read_marked_steps(row["input"], row["label"], step_marker, row.get("prompt"))
    return _CONVERT[kind](row, shape)


def _sft(row: Row, shape: Shape) -> Row:
    if shape.name == "text":
        return {"text": _text(row["text"], "text")}
    if shape.name == "messages":
        messages = _with_system(read_messages(row["messages"], "messages"), row)
        if all(message["role"] != "assistant" for message in messages):
            raise BadRow("a conversation without an assistant's message")
        return {"messages": messages, **_tools(row)}
    prompt, response = _of_one_kind(row, _prompt(row, shape), _response(row, "response", "output"))
    if isinstance(prompt, str):
        return {"prompt": prompt, "response": response}
    assert isinstance(response, list)
    # What is given as a prompt is not trained on, be it the assistant's; Alpaca's history is part of the lesson.
    before = prompt if shape.name == "alpaca" else [_untrained(message) for message in prompt]
    return {"messages": before + response, **_tools(row)}


def _pair(row: Row, shape: Shape) -> Row:
    margin = {} if is_empty(row.get("margin")) else {"margin": _number(row["margin"], "margin")}
    if shape.name == "conversation_pairs":
        return {**_split_pair(row), **margin, **_tools(row)}
    prompt = _prompt(row, shape)
    sides = [_after(prompt, _side(row[name], name), name) for name in ("chosen", "rejected")]
    prompt, chosen, rejected = _of_one_kind(row, prompt, *sides)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **margin, **_tools(row)}


def _labelled(row: Row, shape: Shape) -> Row:
    label = _truth(row["label"])
    if shape.name == "messages":
        messages = _with_system(read_messages(row["messages"], "messages"), row)
        prompt, response = _ends_open(messages[:-1]), _answer(messages[-1:], "messages")
    else:
        prompt, response = _of_one_kind(row, _prompt(row, shape), _response(row, "response", "output"))
    return {"prompt": prompt, "response": response, "label": label, **_tools(row)}


def _stepwise(row: Row, shape: Shape) -> Row:
    steps = "completions" if shape.name == "completions" else "steps"
    return {"prompt": _side(row["prompt"], "prompt"), **read_steps(row[steps], row["labels"], steps)}


def _labelled_prompt(row: Row, shape: Shape) -> Row:
    if shape.name == "messages":
        prompt: Side = _ends_open(_with_system(read_messages(row["messages"], "messages"), row))
    else:
        (prompt,) = _of_one_kind(row, _prompt(row, shape))
    named = not is_empty(row.get("data_source"))
    source = {"source": _text(row["data_source"], "data_source")} if named else {}
    return {"prompt": prompt, "label": _label_text(row["label"]), **source, **_tools(row)}


_CONVERT: dict[DatasetKind, Callable[[Row, Shape], Row]] = {
    "sft": _sft,
    "pairs": _pair,
    "labelled": _labelled,
    "steps": _stepwise,
    "prompts": _labelled_prompt,
    "eval": _labelled_prompt,
}


def _prompt(row: Row, shape: Shape) -> Side:
    """The prompt from a column, from Alpaca's instruction, input and history, or from the conversation so far."""
    if shape.name == "messages":
        return _ends_open(_with_system(read_messages(row["messages"], "messages"), row))
    if shape.name == "alpaca":
        return _alpaca(row)
    side = _side(row["prompt"], "prompt")
    return (
        side if isinstance(side, str) and is_empty(row.get("system")) else _ends_open(_with_system(_turns(side), row))
    )


def _alpaca(row: Row) -> Side:
    """The instruction, and on the next line the input. With a system prompt or history it is a conversation."""
    instruction = _text(row["instruction"], "instruction")
    if not is_empty(row.get("input")):
        instruction += "\n" + _text(row["input"], "input")
    if is_empty(row.get("system")) and is_empty(row.get("history")):
        return instruction
    past: list[Message] = []
    for turn in row.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadRow("column history is no list of (instruction, answer)", shown(turn))
        past += [_message("user", _text(turn[0], "history")), _message("assistant", _text(turn[1], "history"))]
    return _with_system([*past, _message("user", instruction)], row)


def _side(value: Any, column: str) -> Side:
    """A prompt or response: text, a message, or a list of messages."""
    return (
        read_messages(value, column) if isinstance(value, dict) or looks_like_messages(value) else _text(value, column)
    )


def _response(row: Row, *names: str) -> Side:
    name = next(name for name in names if not is_empty(row.get(name)))
    return _answer(_side(row[name], name), name)


def _after(prompt: Side, side: Side, column: str) -> Side:
    """A pair's side without the prompt, where it repeats it."""
    if isinstance(side, list) and side[0]["role"] not in ("assistant", "tool"):
        before = _turns(prompt)
        if side[: len(before)] != before:
            raise BadRow(f"{column} starts with a message that is not the assistant's, and not with the prompt")
        side = side[len(before) :]
    return _answer(side, column)


def _split_pair(row: Row) -> Row:
    """The common start of two conversations is the prompt; what follows are the responses."""
    for name in ("chosen", "rejected"):
        if isinstance(row[name], str):
            raise BadRow(
                "a pair of texts has no prompt", f"column {name} holds {shown(row[name])}; give a prompt column"
            )
    chosen, rejected = (_with_system(read_messages(row[name], name), row) for name in ("chosen", "rejected"))
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    while common and chosen[common - 1]["role"] == "assistant":
        common -= 1
    if not common:
        raise BadRow("chosen and rejected have no common start that could be the prompt")
    prompt = _ends_open(chosen[:common])
    return {
        "prompt": prompt,
        "chosen": _answer(chosen[common:], "chosen"),
        "rejected": _answer(rejected[common:], "rejected"),
    }


def _answer(side: Side, column: str) -> Side:
    """A response, once it is seen that nobody but the assistant and its tools speaks in it."""
    if isinstance(side, list):
        roles = [message["role"] for message in side]
        if not roles or roles[0] != "assistant" or set(roles) - {"assistant", "tool"}:
            raise BadRow(
                f"{column} is no response of the assistant's",
                f"it has the messages {', '.join(roles) or 'none'} after the prompt; it must start with the assistant "
                "and have no further turns of the user",
            )
    return side


def _ends_open(messages: list[Message]) -> list[Message]:
    """A prompt, once it is seen that it leaves the word to the assistant."""
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        last = messages[-1]["role"] if messages else "nobody"
        raise BadRow("a prompt does not end with the user's message or a tool's", f"it ends with {last}'s")
    return messages


def _of_one_kind(row: Row, prompt: Side, *responses: Side) -> tuple[Side, ...]:
    """All as text, or all as messages where one is, or where tools come with them."""
    sides = (prompt, *responses)
    if all(isinstance(side, str) for side in sides) and not _tools(row):
        return sides
    return (_turns(prompt), *(_turns(side, "assistant") for side in responses))


def _turns(side: Side, role: str = "user") -> list[Message]:
    return [_message(role, side)] if isinstance(side, str) else side


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _untrained(message: Message) -> Message:
    return {**message, "weight": 0.0} if message["role"] == "assistant" else message


def _with_system(messages: list[Message], row: Row) -> list[Message]:
    if is_empty(row.get("system")):
        return messages
    system = _message("system", _text(row["system"], "system"))
    if messages[0]["role"] == "system" and messages[0] != system:
        raise BadRow("a system prompt in column system and another in the conversation")
    return messages if messages[0] == system else [system, *messages]


def _tools(row: Row) -> Row:
    tools = read_tools(row.get("tools"))
    return {"tools": tools} if tools else {}


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"column {column} is not text", f"it holds {shown(value)}; give a string")
    return value


def _number(value: Any, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(f"column {column} is not a number", shown(value))
    return number


def _label_text(value: Any) -> str:
    """A prompt's label. A number becomes text: 7 and 7.0, as which pandas holds it beside a missing one, are "7"."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return str(int(value) if value == int(value) else value)
    return _text(value, "label")


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _truth(value: Any) -> bool:
    """A label good or bad: a boolean, 1 or 0, or their text, which is all that CSV has."""
    text = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if text not in _TRUTH:
        raise BadRow("column label is not true or false", shown(value))
    return _TRUTH[text]
