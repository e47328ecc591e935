"""What became of rows when they were made tokens: counts, lengths, an example with its loss mask shown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf_core.data.drops import Dropped, count_drop
from rlhf_core.data.errors import BadRow
from rlhf_core.data.lengths import Lengths, lengths_of
from rlhf_core.data.samples import Item, Sample
from rlhf_core.tracking.plots import plot_histogram

_EXAMPLE_CHARACTERS = 4000


@dataclass(frozen=True)
class TokenReport:
    """rows + unrolled = items + all that was dropped.

    unrolled: items beyond one a row, from conversations whose template rewrites earlier turns and from texts that were
    split. cut: items that lost their end to max_len. trained_tokens: those of weight > 0. unreasoned: turns trained on
    without their reasoning_content, which the chat template does not write. end_tokens: the tokens that end what is
    trained on, and their ids. special_texts: turns trained on whose own text holds special tokens. example: the first
    item, trained text in ⟦ ⟧.
    """

    kind: str
    max_len: int
    rows: int
    unrolled: int
    items: int
    cut: int
    dropped: dict[str, Dropped]
    samples: int
    tokens: int
    trained_tokens: int
    unreasoned: int
    special_texts: int
    end_tokens: dict[str, int]
    lengths: Lengths | None
    example: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> "TokenReport":
        fields = json.loads(text)
        fields["dropped"] = {reason: Dropped(**one) for reason, one in fields["dropped"].items()}
        fields["lengths"] = Lengths(**fields["lengths"]) if fields["lengths"] else None
        return TokenReport(**fields)

    def figures(self) -> dict[str, int]:
        """The counts, as metrics."""
        names = (
            "rows",
            "unrolled",
            "items",
            "cut",
            "samples",
            "tokens",
            "trained_tokens",
            "unreasoned",
            "special_texts",
        )
        return {name: getattr(self, name) for name in names} | {"dropped": self._dropped()}

    def drops_in_words(self) -> str:
        words = (
            f"{reason}: {one.items} (first: row {one.first_row}, {one.first})" for reason, one in self.dropped.items()
        )
        return "; ".join(words) or "none dropped"

    def to_markdown(self, *, held_out: bool = False) -> str:
        """Held-out rows are not trained on: without their example."""
        title = f"Held out: **{self.kind}**" if held_out else f"**{self.kind}**"
        share = 100 * self.trained_tokens / max(1, self.tokens)
        lines = [
            f"{title}: {self.rows} rows read, {self.items} items kept, {self._dropped()} dropped, "
            f"{self.cut} cut at {self.max_len} tokens, {self.unrolled} more than one a row",
            "",
            f"{self.tokens} tokens in {self.samples} samples, {self.trained_tokens} trained on ({share:.1f}%)",
            "",
        ]
        if self.lengths is not None:
            one = self.lengths
            lines += [
                "| tokens | min | median | mean | 95% | max |",
                "|---|---|---|---|---|---|",
                f"| a sample | {one.min} | {one.median:g} | {one.mean:.1f} | {one.p95:g} | {one.max} |",
                "",
            ]
        if self.end_tokens:
            lines += [f"Responses end with {', '.join(f'`{token}`' for token in self.end_tokens)}.", ""]
        if self.unreasoned:
            lines += [f"The chat template leaves out the reasoning of {self.unreasoned} turns.", ""]
        if self.special_texts:
            lines += [
                f"{self.special_texts} responses have special tokens in their own text, which are trained on as such.",
                "",
            ]
        if self.dropped:
            lines += ["| dropped because | items | first row |", "|---|---|---|"]
            lines += [f"| {reason} | {one.items} | {one.first_row} |" for reason, one in self.dropped.items()]
            lines.append("")
        if held_out:
            return "\n".join(lines)
        fence = "`" * (1 + max((len(run) for run in _runs_of(self.example, "`")), default=2))
        lines += ["The first item, trained text in ⟦ ⟧:", "", fence, self.example, fence]
        return "\n".join(lines) + "\n"

    def plot(self, path: Path) -> None:
        """The lengths as a histogram, PNG. Nothing without items."""
        if self.lengths is not None:
            title = f"{self.kind}: {self.samples} samples"
            plot_histogram(path, title, self.lengths.edges, self.lengths.counts, xlabel="tokens", ylabel="samples")

    def _dropped(self) -> int:
        return sum(one.items for one in self.dropped.values())


@dataclass
class TokenCounts:
    """What a report is made of, while rows are encoded."""

    kind: str
    max_len: int
    _rows: int = 0
    _planned: int = 0
    _items: int = 0
    _cut_items: int = 0
    _trained: int = 0
    _unreasoned: int = 0
    _special_texts: int = 0
    _end_tokens: dict[str, int] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)
    _dropped: dict[str, Dropped] = field(default_factory=dict)

    def read(self, items: int) -> None:
        """A row that gives so many items, kept or not."""
        self._rows += 1
        self._planned += items

    def drop(self, bad: BadRow, row_id: int) -> None:
        count_drop(self._dropped, bad, row_id + 1)

    def keep(
        self, items: Sequence[Item], *, cut: bool, unreasoned: int, special_texts: int, end_tokens: Mapping[str, int]
    ) -> None:
        """The items that a planned one has become. end_tokens: of those before they were cut."""
        self._planned += len(items) - 1
        self._items += len(items)
        self._unreasoned += unreasoned
        self._special_texts += special_texts
        self._cut_items += cut
        for sample in (sample for item in items for sample in item.samples):
            self._lengths.append(len(sample))
            trained = sample.ids[sample.weights > 0]
            self._trained += len(trained)
            self._end_tokens |= {token: number for token, number in end_tokens.items() if number in trained}

    def report(self, example: str) -> TokenReport:
        return TokenReport(
            kind=self.kind,
            max_len=self.max_len,
            rows=self._rows,
            unrolled=self._planned - self._rows,
            items=self._items,
            cut=self._cut_items,
            dropped=self._dropped,
            samples=len(self._lengths),
            tokens=sum(self._lengths),
            trained_tokens=self._trained,
            unreasoned=self._unreasoned,
            special_texts=self._special_texts,
            end_tokens=dict(sorted(self._end_tokens.items())),
            lengths=lengths_of(self._lengths) if self._lengths else None,
            example=example,
        )


def show_item(tokenizer: Any, item: Item) -> str:
    """Each sample's text with what is trained on in ⟦ ⟧, a step's verdict behind its placeholder."""
    shown = "\n---\n".join(_show(tokenizer, sample) for sample in item.samples)
    return shown if len(shown) <= _EXAMPLE_CHARACTERS else shown[:_EXAMPLE_CHARACTERS] + " ..."


def _show(tokenizer: Any, sample: Sample) -> str:
    def text(start: int, end: int) -> str:
        return tokenizer.decode(
            sample.ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    pieces, start = [], 0
    for trained, run in groupby((sample.weights > 0).tolist()):
        end = start + len(list(run))
        label = f" = {sample.labels[start]:g}" if trained and sample.labels is not None else ""
        pieces.append(f"⟦{text(start, end)}{label}⟧" if trained else text(start, end))
        start = end
    return "".join(pieces)


def _runs_of(text: str, character: str) -> Iterator[str]:
    return ("".join(run) for found, run in groupby(text) if found == character)
