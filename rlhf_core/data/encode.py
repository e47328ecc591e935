"""From canonical rows to tokens: one function for each kind of row, and what became of every row.

Canonical rows are those of rlhf_core/data/shapes.py. A row gives an item, a conversation whose template rewrites
earlier turns several; or it is dropped for a reason that the report counts. What no row should be (a conversation that
the chat template refuses, steps without labels) is refused: TokenError with the row's number, from 1. With
text.on_bad_row `drop` it is dropped and counted instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhf_core.config.supervised import PrmSettings, TextSettings
from rlhf_core.data.chat import ChatTemplate, Message, as_messages, message_weights
from rlhf_core.data.errors import BadRow, TokenError
from rlhf_core.data.placeholders import place_steps, single_id, step_labels
from rlhf_core.data.samples import Item, Sample
from rlhf_core.data.spans import Draft, Part, Span, Spelled, Speller, special_pattern
from rlhf_core.data.token_report import TokenCounts, TokenReport, show_item

Row = Mapping[str, Any]

ENCODER_VERSION = 2  # part of the token cache's key: raise it when any row gives other tokens or weights

_CHARACTERS_AT_ONCE = 2**20  # of texts that are held and encoded in one call


class ItemSink(Protocol):
    """Takes items as they are made, in order, with the number (from 0) of the row that they come from."""

    def add(self, items: Sequence[Item], row_id: int) -> None: ...


@dataclass
class EncodedItems:
    """The items in memory."""

    items: list[Item] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)

    def add(self, items: Sequence[Item], row_id: int) -> None:
        self.items += items
        self.row_ids += [row_id] * len(items)


@dataclass(frozen=True)
class EncodedData:
    """What became of every row; items and their rows' numbers, unless they went `into` a sink."""

    items: list[Item]
    row_ids: list[int]
    report: TokenReport


@dataclass(frozen=True)
class _Plan:
    """An item before it is tokens. labels: of the steps, whose ends are the draft's marks."""

    drafts: tuple[Draft, ...]
    scalars: dict[str, float] = field(default_factory=dict)
    labels: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class _Made:
    """A plan's items; `cut` says whether they lost their end to max_len."""

    items: tuple[Item, ...]
    cut: bool = False


class Encoder:
    """Encodes rows with one tokenizer under one set of text settings.

    `chat_template` is the template in use, from text.chat_template where that is given: an exported tokenizer has to
    carry it. max_len: longest sequence, tokens. Rows may be more than memory holds: they are gone through once, and
    with `into` items go there as they are made. Raises TokenError for a tokenizer that cannot do what is asked.
    """

    def __init__(self, tokenizer: Any, text: TextSettings, max_len: int):
        self.text = text
        self.max_len = max_len
        self.tokenizer = tokenizer
        self._speller = Speller(tokenizer)
        self._special = special_pattern(tokenizer)
        self._template: ChatTemplate | None = None
        if text.format == "chat":
            self._template = ChatTemplate(tokenizer, read_chat_template(text))

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return self._template.content if self._template is not None else None

    def sft(self, rows: Iterable[Row], *, into: ItemSink | None = None) -> EncodedData:
        """One sample an item, the loss weights of its assistant turns. A text may give several (truncation split)."""
        make = self._chunks if self.text.truncation == "split" else self._item
        return self._encode("sft", rows, self._plan_sft, make, into)

    def pairs(self, rows: Iterable[Row], margin: bool = False, *, into: ItemSink | None = None) -> EncodedData:
        """Two samples an item, chosen and rejected, weight 1 on the response; the scalar `margin` if asked for."""

        def plan(row: Row) -> list[_Plan]:
            drafts = tuple(self._response(row, row[side]) for side in ("chosen", "rejected"))
            return [_Plan(drafts, {"margin": _number(row, "margin")} if margin else {})]

        return self._encode("pairs", rows, plan, self._pair, into)

    def labelled(self, rows: Iterable[Row], *, into: ItemSink | None = None) -> EncodedData:
        """One sample an item, weight 1 on the response; the scalar `label`: 1 for a good response, 0 for a bad one."""

        def plan(row: Row) -> list[_Plan]:
            if not isinstance(row["label"], bool):
                raise TokenError(f"label is {row['label']!r}; give true or false", "label is not true or false")
            return [_Plan((self._response(row, row["response"]),), {"label": float(row["label"])})]

        return self._encode("labelled", rows, plan, self._item, into)

    def steps(self, rows: Iterable[Row], settings: PrmSettings, *, into: ItemSink | None = None) -> EncodedData:
        """One sample an item: the solution with a placeholder behind each step, whose verdicts are the labels there."""
        placeholder = single_id(self.tokenizer, settings.placeholder_token, "placeholder_token")
        for token in settings.reward_tokens:
            single_id(self.tokenizer, token, "reward_tokens")

        def plan(row: Row) -> list[_Plan]:
            labels = step_labels(row["steps"], row["labels"], settings)
            return [_Plan((self._solution(row, settings.separator),), labels=labels)]

        def item(plan: _Plan, spelled: Sequence[Spelled]) -> _Made:
            return self._judged(plan, spelled[0], placeholder)

        return self._encode("steps", rows, plan, item, into)

    def prompts(self, rows: Iterable[Row]) -> EncodedData:
        """One sample an item, what generation is given; no weights. Prompts are never cut."""

        def item(_: _Plan, spelled: Sequence[Spelled]) -> _Made:
            if len(spelled[0].ids) > self.max_len:
                raise BadRow(self._too_long)
            return _Made((Item((Sample(spelled[0].ids, spelled[0].weights),)),))

        return self._encode("prompts", rows, lambda row: [_Plan((Draft((self._prompt(row),)),))], item)

    # -- from a row to texts --------------------------------------------------------------------------------------

    def _plan_sft(self, row: Row) -> list[_Plan]:
        if self.text.format == "text":
            text = _column(row, "text", self.text)
            if not text:
                raise BadRow("no text")
            return [_Plan((Draft((self._trained(text),), closed=True),))]
        if "messages" not in row:
            return [_Plan((self._response(row, _column(row, "response", self.text)),))]
        if self._template is None:
            raise TokenError("text.format template takes prompt and response as text; the row holds a conversation")
        messages = row["messages"]
        weights = message_weights(messages, self.text.train_on)
        return [_Plan((Draft((part,)),)) for part in self._chat_parts(messages, row, weights)]

    def _response(self, row: Row, response: str | Sequence[Message]) -> Draft:
        """Prompt and response as one sequence; weight 1 on the response's assistant turns and their end tokens."""
        if not response or (isinstance(response, str) and not response.strip()):
            raise BadRow("empty response")
        if self._template is None:
            head = self._prompt(row)
            answer = _as_text(response, "response")
            return Draft((head, self._trained(answer)), closed=True)
        prompt, answers = as_messages(row["prompt"], "user"), as_messages(response, "assistant")
        weights = [0.0] * len(prompt) + [float(message["role"] == "assistant") for message in answers]
        parts = self._chat_parts([*prompt, *answers], row, weights)
        if len(parts) != 1:
            raise TokenError(
                "the chat template rewrites the response's earlier turns once later ones follow, so they are no one "
                "sequence; give a template that leaves them (text.chat_template)"
            )
        return Draft((parts[0],))

    def _trained(self, text: str) -> Part:
        """A text all of which is trained on."""
        return Part(text, (Span(0, len(text)),), special_texts=int(self._special.search(text) is not None))

    def _solution(self, row: Row, separator: str) -> Draft:
        """Prompt and solution, up to its end marker, with the steps' ends as marks."""
        # A step that brings its separator along gets no second one; it ends before it either way.
        steps = [step.removesuffix(separator) for step in row["steps"]]
        held = next((step for step in steps if separator and separator in step), None)
        if held is not None:  # new solutions are split at each separator (placeholders.split_steps)
            raise BadRow(
                "a step holds the separator",
                f"{separator!r} in {held[:60]!r} would make several steps of it when scored; set `separator` to a text "
                "that no step holds",
            )
        solution = separator.join(steps) + (separator if row["steps"][-1] != steps[-1] else "")
        ends = np.cumsum([len(step) + len(separator) for step in steps]) - len(separator)
        if self._template is None:
            return Draft((self._prompt(row), Part(solution, (Span(0, len(solution)),), marks=tuple(ends.tolist()))))
        messages = [*as_messages(row["prompt"], "user"), {"role": "assistant", "content": solution}]
        turn = self._template.turn(messages, len(messages) - 1, row.get("tools"))
        if turn.content is None:
            raise TokenError("the chat template writes the solution in another form, so its steps cannot be found")
        # The template may have trimmed the solution.
        begin, end = turn.content
        written = turn.text[begin:end]
        shift = begin + _leading_blanks(written) - _leading_blanks(solution)
        marks = tuple(int(np.clip(shift + place, begin, end)) for place in ends)
        return Draft((Part(turn.text[: turn.end], (Span(turn.start, turn.end),), (turn.prompt,), marks),))

    def _prompt(self, row: Row) -> Part:
        if self._template is not None:
            return Part(self._template.prompt(as_messages(row["prompt"], "user"), row.get("tools")))
        if self.text.format == "text":
            raise TokenError("text.format text takes rows with a column text; use chat or template")
        return Part(self.text.input_template.replace("{}", _as_text(_column(row, "prompt", self.text), "prompt")))

    def _chat_parts(self, messages: Sequence[Message], row: Row, weights: Sequence[float]) -> list[Part]:
        assert self._template is not None
        said = [m["content"].strip() or m.get("tool_calls") for m, w in zip(messages, weights, strict=True) if w > 0]
        if not any(said):
            raise BadRow("no assistant turn to train on")
        return self._template.parts(messages, row.get("tools"), weights)

    # -- from tokens to items -------------------------------------------------------------------------------------

    @property
    def _too_long(self) -> str:
        return f"longer than max_len ({self.max_len} tokens)"

    def _sample(self, spelled: Spelled) -> tuple[Sample, bool]:
        """(the sample, whether it was cut)."""
        ids, weights = spelled.ids, spelled.weights
        if len(ids) <= self.max_len:
            return Sample(ids, weights), False
        if self.text.truncation == "drop":
            raise BadRow(self._too_long)
        ids, weights = ids[: self.max_len], weights[: self.max_len]
        if not weights.any():
            raise BadRow("the prompt leaves no room for a response token")
        return Sample(ids, weights), True

    def _item(self, plan: _Plan, spelled: Sequence[Spelled]) -> _Made:
        samples, cut = zip(*map(self._sample, spelled), strict=True)
        return _Made((Item(samples, plan.scalars),), any(cut))

    def _pair(self, plan: _Plan, spelled: Sequence[Spelled]) -> _Made:
        made = self._item(plan, spelled)
        chosen, rejected = made.items[0].samples
        if np.array_equal(chosen.ids, rejected.ids):
            raise BadRow("chosen and rejected are the same tokens" + (" once cut" if made.cut else ""))
        return made

    def _chunks(self, plan: _Plan, spelled: Sequence[Spelled]) -> _Made:
        """A text in chunks of max_len tokens, the EOS on the last alone.

        Each begins with the token that the one before it ends with, as context: every token is a target once.
        """
        (whole,) = spelled
        if self.max_len < 2:
            raise BadRow(self._too_long)
        starts = range(0, max(1, len(whole.ids) - 1), self.max_len - 1)
        places = [slice(start, start + self.max_len) for start in starts]
        samples = [Sample(whole.ids[place], whole.weights[place].copy()) for place in places]
        for sample in samples:
            sample.weights[0] = 0.0
        return _Made(tuple(Item((sample,), plan.scalars) for sample in samples))

    def _judged(self, plan: _Plan, spelled: Spelled, placeholder: int) -> _Made:
        """The sequence up to the last step's placeholder."""
        ids, places = place_steps(spelled.ids, [mark + 1 for mark in spelled.marks], placeholder)
        ids = ids[: places[-1] + 1]
        weights, labels = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
        for place, label in zip(places, plan.labels, strict=True):
            if label is not None:
                weights[place], labels[place] = 1.0, label
        sample, cut = self._sample(Spelled(ids, weights))
        return _Made((Item((Sample(sample.ids, sample.weights, labels[: len(sample)]),), plan.scalars),), cut)

    # -- all rows -------------------------------------------------------------------------------------------------

    def _encode(
        self,
        kind: str,
        rows: Iterable[Row],
        plan: Callable[[Row], list[_Plan]],
        make: Callable[[_Plan, Sequence[Spelled]], _Made],
        into: ItemSink | None = None,
    ) -> EncodedData:
        held = EncodedItems()
        sink = into if into is not None else held
        first: Item | None = None
        counts = TokenCounts(kind, self.max_len)
        for planned in _batches(self._planned(rows, plan, counts)):
            spelled = iter(self._speller.spell([draft for _, one in planned for draft in one.drafts]))
            for number, one in planned:
                sequences = [next(spelled) for _ in one.drafts]
                try:
                    made = make(one, [_good(sequence) for sequence in sequences])
                except (BadRow, TokenError) as bad:
                    counts.drop(self._dropped(bad, number), number)
                    continue
                parts = [part for draft in one.drafts for part in draft.parts]
                counts.keep(
                    made.items,
                    cut=made.cut,
                    unreasoned=sum(part.unreasoned for part in parts),
                    special_texts=sum(part.special_texts for part in parts),
                    end_tokens=self._end_tokens(one),
                )
                first = first or made.items[0]
                sink.add(made.items, number)
        report = counts.report(show_item(self.tokenizer, first) if first is not None else "")
        if report.rows and first is None:
            raise TokenError(f"data set {kind}: none of the {report.rows} rows can be used: {report.drops_in_words()}")
        return EncodedData(held.items, held.row_ids, report)

    def _dropped(self, bad: BadRow | TokenError, number: int) -> BadRow:
        """What is counted of a row that cannot be used. Raises TokenError, with its number, where that is asked for."""
        if isinstance(bad, BadRow):
            return bad
        if self.text.on_bad_row == "refuse":
            raise TokenError(
                f"row {number + 1}: {bad}; text.on_bad_row: drop leaves such rows out", bad.reason
            ) from None
        return BadRow(bad.reason, str(bad) if str(bad) != bad.reason else "")

    def _end_tokens(self, plan: _Plan) -> dict[str, int]:
        tokens = {token for draft in plan.drafts for part in draft.parts for token in part.end_tokens}
        if any(draft.closed for draft in plan.drafts):
            tokens.add(self.tokenizer.eos_token)
        return {token: self.tokenizer.convert_tokens_to_ids(token) for token in tokens}

    def _planned(
        self, rows: Iterable[Row], plan: Callable[[Row], list[_Plan]], counts: TokenCounts
    ) -> Iterator[tuple[int, _Plan]]:
        """Each item to be, with its row's number from 0."""
        for number, row in enumerate(rows):
            try:
                plans = plan(row)
            except (BadRow, TokenError) as bad:
                counts.read(1)
                counts.drop(self._dropped(bad, number), number)
                continue
            counts.read(len(plans))
            yield from ((number, one) for one in plans)


def _batches(planned: Iterable[tuple[int, _Plan]]) -> Iterator[list[tuple[int, _Plan]]]:
    """As many as have _CHARACTERS_AT_ONCE characters together, or one."""
    batch, size = [], 0
    for number, plan in planned:
        batch.append((number, plan))
        size += sum(len(part.text) for draft in plan.drafts for part in draft.parts)
        if size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_chat_template(text: TextSettings) -> str | None:
    """The template of text.chat_template. Raises TokenError where the file cannot be read."""
    if text.chat_template is None:
        return None
    try:
        return Path(text.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenError(
            f"text.chat_template {text.chat_template!r} cannot be read ({error}); give a Jinja file"
        ) from None


def _good(spelled: Spelled | BadRow | TokenError) -> Spelled:
    if isinstance(spelled, BadRow | TokenError):
        raise spelled
    return spelled


def _column(row: Row, name: str, text: TextSettings) -> Any:
    if name not in row:
        raise TokenError(
            f"text.format {text.format} needs a column {name}; the row has {', '.join(sorted(row))}",
            f"text.format {text.format} needs a column {name}",
        )
    return row[name]


def _as_text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise TokenError(f"text.format template takes {column} as text; the row holds a conversation")
    return value


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TokenError(f"{name} is {value!r}; give a number", f"{name} is no number")
    return float(value)


def _leading_blanks(text: str) -> int:
    return len(text) - len(text.lstrip())
