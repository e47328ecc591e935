"""From text with character spans to token ids with a weight for each: offsets, one BOS, borders that hold.

Spans are looked up in the encoding of the whole text, never by encoding pieces of it. Three things are then checked for
every span: the prompt alone has the token ids with which the whole begins, no token reaches into the span from before
it, and its tokens decode to its text.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.data.errors import BadRow, TokenError

_BORDER_CHARACTERS = 100  # before a border, at least, are encoded to check it


@dataclass(frozen=True)
class Span:
    """Characters start to end - 1 are trained on with this weight."""

    start: int
    end: int
    weight: float = 1.0


@dataclass(frozen=True)
class Part:
    """A text that is encoded as one.

    borders: lengths of its beginnings that generation is given as prompts. marks: ends of steps, in characters; asked
    for is the token that holds the character before each. unreasoned: turns whose reasoning the text does not hold.
    end_tokens: those with which its spans end. special_texts: trained texts that hold special tokens of their own.
    """

    text: str
    spans: tuple[Span, ...] = ()
    borders: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    unreasoned: int = 0
    end_tokens: frozenset[str] = frozenset()
    special_texts: int = 0


@dataclass(frozen=True)
class Draft:
    """A sequence before it is tokens. Its parts are encoded apart and joined; `closed` adds the EOS as a target."""

    parts: tuple[Part, ...]
    closed: bool = False


@dataclass(frozen=True, eq=False)
class Spelled:
    """ids: (T,) int32. weights: (T,) float32. marks: the token of each mark."""

    ids: np.ndarray
    weights: np.ndarray
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _Encoding:
    """ids and each token's (start, end) in the text."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def special_tokens(tokenizer: Any) -> list[str]:
    """Every token that the tokenizer knows as special, eos and bos among them."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | {token for token in (tokenizer.bos_token, tokenizer.eos_token) if token})


def special_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Finds special tokens in a text, the longest first."""
    tokens = sorted(map(re.escape, special_tokens(tokenizer)), key=len, reverse=True)
    return re.compile("|".join(tokens) or r"(?!)")


class Speller:
    """Encodes drafts with one tokenizer.

    A sequence begins with exactly one BOS if the text (its chat template) writes one or the tokenizer adds one, and
    with none if neither does.
    """

    def __init__(self, tokenizer: Any):
        if not tokenizer.is_fast:
            raise TokenError(
                f"{type(tokenizer).__name__} gives no offsets; give a tokenizer of the `tokenizers` library "
                "(tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self._bos, self._bos_id = tokenizer.bos_token, tokenizer.bos_token_id
        self._adds_bos = self._bos_id is not None and tokenizer("x")["input_ids"][:1] == [self._bos_id]
        self._special = special_pattern(tokenizer)
        self._special_ids = set(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer)))
        self._anchors: dict[int, str] = {}

    def spell(self, drafts: Sequence[Draft]) -> list[Spelled | BadRow | TokenError]:
        """Each draft's tokens, or why it has none. One call of the tokenizer for all."""
        texts: dict[str, int] = {}

        def wanted(text: str) -> None:
            texts.setdefault(text, len(texts))

        for draft in drafts:
            for number, part in enumerate(draft.parts):
                text, dropped = self._one_bos(part.text, number)
                wanted(text)
                borders = [border - dropped for border in part.borders]
                for border, cut in zip(borders, self._cuts(text, borders), strict=True):
                    wanted(text[cut:border])
        encodings = self._encode(list(texts))
        known = {text: encodings[number] for text, number in texts.items()}
        spelled: list[Spelled | BadRow | TokenError] = []
        for draft in drafts:
            try:
                spelled.append(self._join(draft, known))
            except (BadRow, TokenError) as error:
                spelled.append(error)
        return spelled

    def ids(self, text: str) -> list[int]:
        """Token ids of a text alone, with its BOS."""
        text, _ = self._one_bos(text, 0)
        return self._with_bos(text, self._encode([text])[0]).ids.tolist()

    def _join(self, draft: Draft, known: dict[str, _Encoding]) -> Spelled:
        ids, weights, marks, length = [], [], [], 0
        for number, part in enumerate(draft.parts):
            text, dropped = self._one_bos(part.text, number)
            whole = known[text] if number else self._with_bos(text, known[text])
            self._check_borders(text, [border - dropped for border in part.borders], number == 0, known, whole)
            ids.append(whole.ids)
            weights.append(self._weights(part, text, dropped, whole))
            marks += [length + _token_before(whole, mark - dropped) for mark in part.marks]
            length += len(whole.ids)
        if draft.closed:
            ids.append(np.array([self._eos_id()], np.int32))
            weights.append(np.ones(1, np.float32))
        joined = np.concatenate(weights)
        joined[:1] = 0.0  # nothing precedes the first token
        return Spelled(np.concatenate(ids), joined, tuple(marks))

    def _weights(self, part: Part, text: str, dropped: int, whole: _Encoding) -> np.ndarray:
        weights = np.zeros(len(whole.ids), np.float32)
        for span in part.spans:
            start, end = span.start - dropped, span.end - dropped
            if start >= end:
                continue
            first, last = _tokens_of(whole, start, end)
            if first == len(whole.ids):  # offsets without white space give a blank text no place
                raise BadRow("no token to train on", f"for {text[start:end]!r}")
            if whole.starts[first] < start:
                raise BadRow(
                    "a token holds both prompt and response",
                    f"{text[whole.starts[first] : whole.ends[first]]!r} at ...{text[max(0, start - 20) : start]!r}",
                )
            self._check_text(whole.ids, first, last + 1, text[start:end])
            weights[first : last + 1] = span.weight
        return weights

    def _cuts(self, text: str, borders: Sequence[int]) -> list[int]:
        """For each border, from where on the text before it is encoded to check it: a special token, or 0.

        Text is cut at special tokens before it is encoded, so what stands before one changes no token behind it; and to
        encode all of it for each turn would cost the square of a conversation's length.
        """
        if not borders:
            return []
        places = [0, *(found.start() for found in self._special.finditer(text))]
        return [places[max(1, bisect_right(places, border - _BORDER_CHARACTERS)) - 1] for border in borders]

    def _check_borders(
        self, text: str, borders: Sequence[int], begins: bool, known: dict[str, _Encoding], whole: _Encoding
    ) -> None:
        """Each beginning of the text has, encoded alone, the tokens with which the whole begins.

        begins: whether the text begins its sequence.
        """
        for border, cut in zip(borders, self._cuts(text, borders), strict=True):
            first = int(np.searchsorted(whole.ends, cut, side="right")) if cut else 0
            if cut and (whole.starts[first] != cut or int(whole.ids[first]) not in self._special_ids):
                cut = first = 0  # what looks like a special token was not taken for one
            prompt = text[cut:border]
            head = known[prompt] if prompt in known else self._encode([prompt])[0]
            if begins and not cut:
                head = self._with_bos(text, head)
            if not np.array_equal(head.ids, whole.ids[first : first + len(head.ids)]):
                raise BadRow(
                    "a token holds both prompt and response",
                    f"the prompt's tokens, alone, are not those with which the whole begins, at ...{prompt[-20:]!r}",
                )

    def _check_text(self, ids: np.ndarray, first: int, end: int, expected: str) -> None:
        """The tokens decode to the text, or to what the tokenizer makes of that text (unknown characters, NFC)."""
        anchor = int(ids[first - 1]) if first else None
        found = self._decoded(anchor, ids[first:end].tolist())
        if found == expected:
            return
        alone = self.tokenizer(expected, add_special_tokens=False)["input_ids"]
        if found != self._decoded(anchor, alone):
            raise TokenError(
                f"the tokens to be trained on decode to {found[:60]!r}, not to {expected[:60]!r}",
                "the tokens to be trained on decode to another text",
            )

    def _decoded(self, anchor: int | None, ids: list[int]) -> str:
        """The text of tokens that stand behind `anchor`: some decoders trim the first token of what they are given."""
        if anchor is None:
            return self._decode(ids)
        if anchor not in self._anchors:
            self._anchors[anchor] = self._decode([anchor])
        return self._decode([anchor, *ids]).removeprefix(self._anchors[anchor])

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _one_bos(self, text: str, number: int) -> tuple[str, int]:
        """(the text with one BOS where it begins with several, how many characters that took away)."""
        if number or not self._bos or not text.startswith(2 * self._bos):
            return text, 0
        kept = text
        while kept.startswith(2 * self._bos):
            kept = kept.removeprefix(self._bos)
        return kept, len(text) - len(kept)

    def _with_bos(self, text: str, encoding: _Encoding) -> _Encoding:
        """The first part's encoding with the BOS that the tokenizer would add, unless the text holds it."""
        if not self._adds_bos or text.startswith(self._bos):
            return encoding
        zero = np.zeros(1, np.int32)
        return _Encoding(
            np.concatenate([np.array([self._bos_id], np.int32), encoding.ids]),
            np.concatenate([zero, encoding.starts]),
            np.concatenate([zero, encoding.ends]),
        )

    def _encode(self, texts: list[str]) -> list[_Encoding]:
        if not texts:
            return []
        # Not through the tokenizer's call, which makes several lists of each encoding: half of the time goes there.
        self.tokenizer.backend_tokenizer.no_padding()
        self.tokenizer.backend_tokenizer.no_truncation()
        found = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return [_encoding(one.ids, one.offsets) for one in found]

    def _eos_id(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise TokenError("the tokenizer has no eos token to end a response with; give one that has")
        return self.tokenizer.eos_token_id


def _encoding(ids: list[int], offsets: list[tuple[int, int]]) -> _Encoding:
    places = np.array(offsets, np.int32).reshape(-1, 2)
    return _Encoding(np.array(ids, np.int32), places[:, 0], places[:, 1])


def _tokens_of(encoding: _Encoding, start: int, end: int) -> tuple[int, int]:
    """The first and the last token of characters start to end - 1. A last character of several tokens takes them all;
    where offsets leave out white space, no token may end at `end`, and the last is the first one to end behind it."""
    first = int(np.searchsorted(encoding.ends, start, side="right"))
    reaching = int(np.searchsorted(encoding.ends, end, side="left"))
    ending = int(np.searchsorted(encoding.ends, end, side="right")) - 1
    return first, max(reaching, ending)


def _token_before(encoding: _Encoding, end: int) -> int:
    """The token that holds the last of `end` characters, the last of them if it takes several."""
    return int(np.searchsorted(encoding.starts, end, side="left")) - 1
