"""A data set from its settings: its sources read, converted, split and mixed, with an account of every row."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rlhf_core.config.data import ArithmeticSource, DataSource, SourceFields
from rlhf_core.config.shapes import DatasetKind
from rlhf_core.data import arithmetic
from rlhf_core.data.drops import Dropped, count_drop
from rlhf_core.data.errors import BadRow, DataError
from rlhf_core.data.rows import Row
from rlhf_core.data.shapes import check_mapped, convert, recognise, renamed
from rlhf_core.data.sources import read_hub, read_path

EQUAL_PAIR = "chosen equals rejected"


@dataclass(frozen=True)
class Reading:
    """What one file or split gave: `rows` are canonical, `read` counts those that were there."""

    name: str
    shape: str
    rows: list[Row]
    read: int
    dropped: dict[str, Dropped] = field(default_factory=dict)
    unused_columns: tuple[str, ...] = ()
    unused_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedSource:
    """`held_out` is None where a share of `train` itself was held out: `held_out_rows` then came from there."""

    train: Reading
    held_out: Reading | None
    rows: list[Row]
    held_out_rows: list[Row]


@dataclass(frozen=True)
class LoadedData:
    """`rows` and `held_out`: the data set; prompts of a mixture name their source. `taken[i]`: how many of `rows` come
    from source i."""

    rows: list[Row]
    held_out: list[Row]
    sources: list[LoadedSource]
    taken: list[int]


def load_data(kind: DatasetKind, data: DataSource) -> LoadedData:
    """All rows of a data set, in canonical form. Raises DataError."""
    sources = [_load_source(kind, data, part) for part in data.parts]
    probabilities = [part.probability for part in data.sources if part.probability is not None]
    counts = [len(source.rows) for source in sources]
    draws = interleaved(counts, probabilities, data.seed) if probabilities else _one_after_the_other(counts)
    order = list(islice(draws, data.max_samples))
    taken = [0] * len(sources)
    for number, _ in order:
        taken[number] += 1
    labels = [{"source": label} for label in data.labels] if kind in ("prompts", "eval") else []
    named = labels or [{} for _ in sources]
    return LoadedData(
        rows=[{**named[number], **sources[number].rows[row]} for number, row in order],
        held_out=[{**name, **row} for name, source in zip(named, sources, strict=True) for row in source.held_out_rows],
        sources=sources,
        taken=taken,
    )


def interleaved(counts: Sequence[int], probabilities: Sequence[float], seed: int) -> Iterator[tuple[int, int]]:
    """(source, row) of each draw from a mixture, until the last of the sources has been gone through once.

    Each draw takes the next row of a source chosen by `probabilities`; a source that ends starts again. The order is
    that of `datasets.interleave_datasets` with `all_exhausted`.
    """
    rng = np.random.default_rng(seed)
    weights = np.asarray(probabilities) / math.fsum(probabilities)  # NumPy wants a sum of 1 more exactly than we do
    taken = [0] * len(counts)
    left = len(counts)
    while left:
        for number in rng.choice(len(counts), size=1000, p=weights).tolist():
            yield number, taken[number] % counts[number]
            taken[number] += 1
            left -= taken[number] == counts[number]
            if not left:
                return


def _one_after_the_other(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((number, row) for number, count in enumerate(counts) for row in range(count))


def _load_source(kind: DatasetKind, data: DataSource, source: SourceFields) -> LoadedSource:
    if source.arithmetic is not None:
        return _generated(kind, source.arithmetic)
    raw = _read_split(source, source.split)
    train = _converted(kind, data, source, source.name, raw[: source.max_samples])
    if source.eval_share is not None:
        rows, held_out_rows = _share_held_out(train, source.eval_share)
        return LoadedSource(train, None, rows, held_out_rows)
    held_out = None
    if source.has_held_out:
        where = source.eval_name
        raw_held_out = _read_held_out(source)
        if raw_held_out == raw:  # a copy, a loader that ignores `split`; equal names the settings model refuses
            raise DataError(
                f"data set {kind}: the held-out rows ({where}) are the training rows; set eval_share instead"
            )
        held_out = _converted(kind, data, source, where, raw_held_out)
    return LoadedSource(train, held_out, train.rows, held_out.rows if held_out else [])


def _read_held_out(source: SourceFields) -> list[Row]:
    if source.eval_path is not None:
        return read_path(source.eval_path, source.eval_split)
    if source.eval_hub is not None:
        return read_hub(source.eval_hub, source.eval_revision, source.eval_subset, source.eval_split)
    return _read_split(source, source.eval_split)


def _read_split(source: SourceFields, split: str | None) -> list[Row]:
    if source.hub is not None:
        return read_hub(source.hub, source.revision, source.subset, split)
    assert source.path is not None  # the settings model admits no other case
    return read_path(source.path, split)


def _converted(kind: DatasetKind, data: DataSource, source: SourceFields, name: str, raw: Sequence[Row]) -> Reading:
    """Raw rows as canonical ones; what cannot be used is refused or counted, as `on_bad_row` says."""
    rows = [renamed(row, source.columns) for row in raw]
    try:
        check_mapped(raw, source.columns)
        found = recognise(rows, kind, source.columns, source.shape)
    except DataError as error:
        raise DataError(f"data set {kind}: {name} {error}") from None
    kept: list[Row] = []
    dropped: dict[str, Dropped] = {}
    for number, row in enumerate(rows, start=1):
        try:
            kept.append(_usable(convert(row, kind, found.shape, source.step_marker)))
        except BadRow as bad:
            if data.on_bad_row == "refuse" and bad.reason != EQUAL_PAIR:
                raise DataError(
                    f"data set {kind}: row {number} of {name}: {bad}; mend it, or set on_bad_row: drop"
                ) from None
            count_drop(dropped, bad, number)
    if not kept:
        reasons = ", ".join(f"{reason} ({one.items})" for reason, one in dropped.items())
        raise DataError(f"data set {kind}: none of the {len(rows)} rows of {name} can be used: {reasons}; mend them")
    return Reading(name, found.described, kept, len(rows), dropped, found.unused, found.unused_keys)


def _usable(row: Row) -> Row:
    """The row, unless it is a pair that has nothing to teach, or cannot be written. Raises BadRow.

    Such pairs are always dropped and counted.
    """
    if "chosen" in row and row["chosen"] == row["rejected"]:
        raise BadRow(EQUAL_PAIR)
    try:
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise BadRow("a text has half a character, a lone surrogate", ascii(error.object[error.start])) from None
    except (TypeError, ValueError) as error:
        raise BadRow("a value that JSON does not have", str(error)) from None
    return row


def _share_held_out(train: Reading, share: float) -> tuple[list[Row], list[Row]]:
    rows: list[Row] = []
    held_out: list[Row] = []
    for row in train.rows:
        (held_out if is_held_out(row, share) else rows).append(row)
    if not rows or not held_out:
        raise DataError(
            f"{train.name}: eval_share {share:g} holds out {len(held_out)} of {len(train.rows)} rows, by a hash of "
            f"their prompt; change it, or give held-out rows with eval_path"
        )
    return rows, held_out


def is_held_out(row: Row, share: float) -> bool:
    """Whether a canonical row is held out: a function of its prompt, so that rows of one prompt stay together.

    A conversation's prompt is what comes before the assistant's first message; plain text is its own.
    """
    text = json.dumps(_prompt_of(row), sort_keys=True, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < share * 2**64


def _prompt_of(row: Row) -> object:
    if "messages" in row:
        messages = row["messages"]
        return messages[: [message["role"] for message in messages].index("assistant")]
    return row.get("prompt", row.get("text"))


_GENERATORS: dict[DatasetKind, Callable[[arithmetic.ArithmeticSpec], list[Row]]] = {
    "sft": arithmetic.sft_rows,
    "pairs": arithmetic.pair_rows,
    "labelled": arithmetic.labelled_rows,
    "steps": arithmetic.step_rows,
    "prompts": arithmetic.prompt_rows,
    "eval": arithmetic.prompt_rows,
}


def _generated(kind: DatasetKind, source: ArithmeticSource) -> LoadedSource:
    def reading(count: int, split: arithmetic.Split) -> Reading:
        spec = arithmetic.ArithmeticSpec(
            seed=source.seed, rows=count, max_number=source.max_number, terms=source.terms, split=split
        )
        rows = _GENERATORS[kind](spec)
        return Reading("arithmetic", "generated", rows, len(rows))

    try:
        train = reading(source.rows, "heldout" if kind == "eval" else "train")
        held_out = reading(source.eval_rows, "heldout") if source.eval_rows else None
    except ValueError as error:
        raise DataError(f"data set {kind}: {error}") from None
    return LoadedSource(train, held_out, train.rows, held_out.rows if held_out else [])
