"""Conversations through a chat template: their text, and which of its characters are trained on.

Of an assistant turn, its content is trained on as the template writes it, with reasoning and tool calls where the
template writes those, and the end marker: what follows at once, up to and including the token that ends the turn.
Text that the template puts before the content and that is not the message's (Qwen 3's empty think block) is context.
White space there is trained on: generation begins before it, so it has to come from the model.

Where a turn lies is found without knowing the template. The turn is rendered once more with a sentinel in place of its
content (and one in place of its reasoning); what stands before and behind the sentinels is the template's. Put back
together with the message's own text this must give the real rendering, up to white space at the edges of the content
and the reasoning, or the row is refused. So is
one in which the turn does not follow exactly what generation would be given, or in which a message is lost.

A template may write earlier turns otherwise than the last one (Qwen 3 leaves out their think blocks). Each turn is
therefore rendered as the last of its conversation, as it was when it was generated. Turns whose rendering is the
beginning of a later one's share its sequence, others get one of their own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_core.data.errors import TokenError
from rlhf_core.data.spans import Part, Span, special_pattern

Message = Mapping[str, Any]  # role, content, and tool_calls, reasoning_content, weight where it has them

# Some templates write today's date; a row must give the same tokens on every day. The one Llama 3.1 writes itself.
_DATE = datetime(2024, 7, 26)
_BLANKS = re.compile(r"\s*")
_THINK_TAG = re.compile(r"(<[^<>\s]*think[^<>\s]*>|\[/?think\])", re.IGNORECASE)
_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Turn:
    """An assistant turn in `text`, its conversation rendered up to it.

    prompt: characters that generation is given before it. start, end: of what is trained on. content: where the
    message's content lies, None if the template writes it in another form (with its think block taken apart).
    end_token: with which it ends. unreasoned: the message has reasoning that the template does not write.
    special: its own text holds a special token.
    """

    text: str
    prompt: int
    start: int
    end: int
    content: tuple[int, int] | None
    end_token: str
    unreasoned: bool
    special: bool


@dataclass(frozen=True)
class _Frame:
    """What the template writes around a turn's content: `before` it from the end of the prompt on, `after` it."""

    before: str
    after: str


class ChatTemplate:
    """A tokenizer's chat template, or `template` (Jinja) in its stead.

    Raises TokenError where there is none.
    """

    def __init__(self, tokenizer: Any, template: str | None = None):
        self._tokenizer = tokenizer
        self._template = template
        if template is None and not tokenizer.chat_template:
            raise TokenError(
                "the tokenizer has no chat template; give a model whose tokenizer has one, or text.chat_template"
            )
        self._variables = {**tokenizer.special_tokens_map, "strftime_now": _DATE.strftime}
        self._end_token = special_pattern(tokenizer)

    @property
    def content(self) -> str | dict[str, str]:
        """All that renderings depend on: the Jinja text, or several by name (Hugging Face: default, tool_use)."""
        return self._tokenizer.chat_template if self._template is None else self._template

    def source(self, tools: Sequence[Any] | None) -> str:
        """The Jinja text; a tokenizer may have one of its own for conversations with tools."""
        if self._template is not None:
            return self._template
        try:
            return self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        except ValueError as error:  # several, and none of them `default`
            raise TokenError(
                f"the tokenizer has no chat template for this row: {' '.join(str(error).split())}"
            ) from None

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """What generation of an assistant's answer is given. Raises TokenError where a message is lost."""
        text = self._render(messages, tools, generation_prompt=True)[0]
        _check_context(text, messages)
        return text

    def parts(self, messages: Sequence[Message], tools: Sequence[Any] | None, weights: Sequence[float]) -> list[Part]:
        """The sequences that train the assistant turns of weight > 0, each turn in one of them.

        weights: one for each message. Raises TokenError with the number of the message at fault.
        """
        turns = {i: self.turn(messages, i, tools) for i, weight in enumerate(weights) if weight > 0}
        groups: list[list[int]] = []  # the turns of a sequence, the last of them first
        for i in sorted(turns, reverse=True):
            begins = turns[i].text[: turns[i].end]
            home = next((group for group in groups if turns[group[0]].text.startswith(begins)), None)
            if home is None:
                groups.append([i])
            else:
                home.append(i)
        parts = []
        for group in reversed(groups):
            last = turns[group[0]]
            members = [(turns[i], weights[i]) for i in reversed(group)]
            parts.append(
                Part(
                    last.text[: last.end],
                    spans=tuple(Span(turn.start, turn.end, weight) for turn, weight in members),
                    borders=tuple(turn.prompt for turn, _ in members),
                    unreasoned=sum(turn.unreasoned for turn, _ in members),
                    end_tokens=frozenset(turn.end_token for turn, _ in members),
                    special_texts=sum(turn.special for turn, _ in members),
                )
            )
        return parts

    def turn(self, messages: Sequence[Message], i: int, tools: Sequence[Any] | None = None) -> Turn:
        """The assistant turn messages[i], rendered as the last of its conversation."""
        context, message = messages[:i], messages[i]
        try:
            return self._turn(context, message, tools)
        except TokenError as error:
            raise TokenError(f"message {i + 1} ({message['role']}): {error}", error.reason) from None

    def _turn(self, context: Sequence[Message], message: Message, tools: Sequence[Any] | None) -> Turn:
        if not context:
            raise TokenError("an assistant's turn with nothing before it cannot be trained on; give a prompt")
        prompt = self.prompt(context, tools)
        text, marked = self._render([*context, message], tools)
        if not text.startswith(prompt):
            raise TokenError(
                "the chat template renders the prompt otherwise once a response follows: it ends with "
                f"{prompt[-40:]!r} for generation, the whole reads {text[: len(prompt)][-40:]!r} there",
                "the chat template renders the prompt otherwise once a response follows",
            )
        completion = text[len(prompt) :]
        frame = self._frame(context, message, tools, prompt, text)
        content = _content_place(completion, frame, message["content"])
        start = self._start(completion, frame, content, message)
        end, end_token = self._end(completion, frame, message)
        turn = Turn(
            text=text,
            prompt=len(prompt),
            start=len(prompt) + start,
            end=len(prompt) + end,
            content=content and (len(prompt) + content[0], len(prompt) + content[1]),
            end_token=end_token,
            unreasoned=_squeezed(message.get("reasoning_content") or "") not in _squeezed(completion),
            special=self._end_token.search(message["content"] + (message.get("reasoning_content") or "")) is not None,
        )
        if _MARKERS.search(self.source(tools)):
            self._check_markers(turn, marked, context, tools)
        return turn

    def _frame(
        self, context: Sequence[Message], message: Message, tools: Sequence[Any] | None, prompt: str, text: str
    ) -> _Frame:
        """Renders the turn with sentinels, and checks that their places filled with the message give the real turn."""
        content_mark, reasoning_mark = _sentinel("content", text), _sentinel("reasoning", text)
        probe = {**message, "content": content_mark}
        reasoning = message.get("reasoning_content")
        if reasoning:
            probe["reasoning_content"] = reasoning_mark
        shown = self._render([*context, probe], tools)[0]
        found = shown.count(content_mark)
        unwritten = found == 0 and message.get("tool_calls") and not message["content"].strip()
        if not shown.startswith(prompt) or (found != 1 and not unwritten):
            raise TokenError(
                f"the chat template writes the content of this turn {found} times, and must once"
                if shown.startswith(prompt)
                else "the chat template changes what stands before the turn with the turn's content"
            )
        before, _, after = shown[len(prompt) :].partition(content_mark)
        if unwritten:
            before, after = "", before
        completion = text[len(prompt) :]
        around = [_filled(text, reasoning_mark, reasoning or "") for text in (before, after)]
        if _consists_of(completion, [*around[0], message["content"], *around[1]]):
            return _Frame(before.replace(reasoning_mark, reasoning or ""), after)
        if _is_rest_of([*_THINK_TAG.split(message["content"]), after], prompt, completion):
            return _Frame("", after)
        raise TokenError(
            "the chat template writes something else than this turn's content, reasoning and tool calls: "
            f"{_shortened(completion)} for content {_shortened(message['content'])}",
            "the chat template writes something else than a turn's content, reasoning and tool calls",
        )

    def _start(self, completion: str, frame: _Frame, content: tuple[int, int] | None, message: Message) -> int:
        """Where in the completion training begins: behind what the template has put before the content."""
        calls = message.get("tool_calls") or ()
        lost = _lost_call(completion, calls)
        if lost is not None:
            raise TokenError(
                f"the chat template leaves out the tool call {lost}; give one that knows tool calls",
                "the chat template leaves out a tool call",
            )
        reasoning = (message.get("reasoning_content") or "").strip()
        if not frame.before.strip() or (reasoning and _squeezed(reasoning) in _squeezed(frame.before)):
            return 0
        if content is not None:
            start = content[0]
        elif not message["content"].strip() and completion.startswith(frame.before):
            start = len(frame.before)  # tool calls alone
        else:
            raise TokenError(
                f"the chat template's own text {frame.before!r} cannot be told from the turn's",
                "the chat template's own text cannot be told from a turn's",
            )
        return start if _lost_call(completion[start:], calls) is None else 0  # some write the calls first

    def _end(self, completion: str, frame: _Frame, message: Message) -> tuple[int, str]:
        """(where in the completion the turn's end token ends, that token).

        It is the first special token behind the content. Behind tool calls, whose own tokens may be special, it is the
        last one, with nothing but white space behind it.
        """
        if not message.get("tool_calls") and completion.endswith(frame.after):
            found = self._end_token.search(frame.after)
            if found is not None and not frame.after[: found.start()].strip():
                return len(completion) - len(frame.after) + found.end(), found.group()
        ends = list(self._end_token.finditer(completion))
        if not ends or completion[ends[-1].end() :].strip():
            raise TokenError(
                "the chat template does not end a response with the tokenizer's eos "
                f"{self._tokenizer.eos_token!r} or another special token, but with {completion[-40:]!r}",
                "the chat template does not end a response with a special token",
            )
        return ends[-1].end(), ends[-1].group()

    def _check_markers(
        self, turn: Turn, marked: Sequence[tuple[int, int]], context: Sequence[Message], tools: Sequence[Any] | None
    ) -> None:
        """The template's own generation markers must enclose the turn, and no other message's text."""
        marked = _joined(marked)
        turns = 1 + sum(message["role"] == "assistant" for message in context)
        start, end = marked[-1] if marked else (0, 0)
        before = self._render(context, tools)[0]
        common = _common_length(before, turn.text)
        if len(marked) != turns or not common <= start <= turn.start or end < turn.end:
            raise TokenError(
                f"the chat template's generation markers enclose {_shortened(turn.text[start:end])} (block "
                f"{len(marked)}), the assistant's turn {turns} is {_shortened(turn.text[turn.start : turn.end])}",
                "the chat template's generation markers do not enclose a turn",
            )

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, the (start, end) of what generation markers enclose)."""
        source = self.source(tools)
        try:
            rendered: Any = render_jinja_template(
                [[{name: value for name, value in message.items() if name != "weight"} for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=source,
                return_assistant_tokens_mask=not generation_prompt and _MARKERS.search(source) is not None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from None
        texts, marked = rendered
        return texts[0], marked[0] if marked else []


def message_weights(messages: Sequence[Message], train_on: str) -> list[float]:
    """The loss weight of each message: its own `weight` for assistant turns (1 without one), 0 for all others.

    An assistant's turn that opens the conversation has nothing before it to answer, and weight 0.
    train_on: "all", or "last" for the last assistant turn alone. Raises TokenError for a weight below 0.
    """
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    trained = assistants if train_on == "all" else assistants[-1:]
    weights = [0.0] * len(messages)
    for i in trained:
        weights[i] = float(messages[i].get("weight", 1.0))
        if not weights[i] >= 0:
            raise TokenError(
                f"message {i + 1} has the weight {messages[i]['weight']}; give 0 or more", "a weight below 0"
            )
    return weights


def as_messages(text_or_messages: str | Sequence[Message], role: str) -> list[Message]:
    """A string as one message of `role`; messages as they are."""
    if isinstance(text_or_messages, str):
        return [{"role": role, "content": text_or_messages}]
    return list(text_or_messages)


def _check_context(text: str, messages: Sequence[Message]) -> None:
    """Every user's and tool's message stands in the text, in order, and the system's somewhere.

    Templates trim messages, and some write a tool's as JSON. Earlier assistant turns they may rewrite.
    """
    at = 0
    for number, message in enumerate(messages, start=1):
        content = message["content"].strip()
        if message["role"] == "assistant" or not content:
            continue
        begin = 0 if message["role"] == "system" else at
        quoted = json.dumps(content, ensure_ascii=False)[1:-1]
        places = [(place, form) for form in {content, quoted} if (place := text.find(form, begin)) >= 0]
        if not places:
            raise TokenError(
                f"message {number} ({message['role']}) is lost in the chat template's rendering",
                f"a {message['role']}'s message is lost in the chat template's rendering",
            )
        if message["role"] != "system":
            place, form = min(places)
            at = place + len(form)


def _lost_call(text: str, calls: Sequence[Mapping[str, Any]]) -> str | None:
    """The first tool call whose name does not stand in the text, in order, with the names of its arguments behind."""
    at = 0
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        place = text.find(name, at)
        at = place + len(name)
        if place < 0 or any(argument not in text[at:] for argument in arguments):
            return name
    return None


def _is_rest_of(pieces: Sequence[str], prompt: str, completion: str) -> bool:
    """Whether the completion consists of the pieces, or of those that the prompt has not begun already.

    So where the content holds its reasoning, which the template takes apart and writes in its own way, after a
    generation prompt that may open the think block.
    """

    def begins(*begun: str) -> bool:
        return _squeezed(prompt).endswith(_squeezed("".join(begun)))

    if any(_consists_of(completion, pieces[k:]) and begins(*pieces[:k]) for k in range(len(pieces))):
        return True
    last, rest = pieces[-1].strip(), completion.strip()  # the prompt may have begun what follows the content, too
    return last.endswith(rest) and begins(*pieces[:-1], last.removesuffix(rest))


def _consists_of(text: str, pieces: Sequence[str]) -> bool:
    """Whether the text is these pieces one after the other, up to white space at their edges."""
    at = 0
    for piece in map(str.strip, pieces):
        at = _BLANKS.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] - it may be empty
        if not text.startswith(piece, at):
            return False
        at += len(piece)
    return not text[at:].strip()


def _content_place(completion: str, frame: _Frame, content: str) -> tuple[int, int] | None:
    """(start, end) of the content in the completion, where it stands there whole but for white space at its ends."""
    start, end = len(frame.before), len(completion) - len(frame.after)
    framed = completion.startswith(frame.before) and completion.endswith(frame.after) and start <= end
    return (start, end) if framed and completion[start:end].strip() == content.strip() else None


def _filled(text: str, mark: str, value: str) -> list[str]:
    """The pieces of a text between marks, with the value at each mark."""
    first, *others = text.split(mark)
    return [first, *(piece for other in others for piece in (value, other))]


def _sentinel(name: str, text: str) -> str:
    """A word that the text does not hold: letters and digits, which no template changes."""
    number = 0
    while (word := f"Sentinel{name}{number}x") in text:
        number += 1
    return word


def _joined(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Places that touch as one: some templates mark a turn and its end token apart."""
    joined: list[tuple[int, int]] = []
    for start, end in places:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _common_length(a: str, b: str) -> int:
    """Characters with which both begin."""
    if b.startswith(a):
        return len(a)
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:40] + "..." + text[-17:])
