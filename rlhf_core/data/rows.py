"""Reads data files into rows with the project's own column names; refuses what a stage could not use."""

import csv
import io
import json
import math
import posixpath
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec

from rlhf_core.config.data import DATASET_COLUMNS, ArithmeticSource, DataSource
from rlhf_core.data import arithmetic
from rlhf_core.data.errors import DataError

Row = dict[str, Any]


def load_rows(kind: str, source: DataSource) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows) of a data set, generated or read, with the columns of DATASET_COLUMNS[kind]."""
    if source.arithmetic is not None:
        return _generated(kind, source.arithmetic)
    assert source.path is not None  # the settings model admits no other case
    rows = read_columns(source.path, kind, source.columns)[: source.max_rows]
    eval_rows = read_columns(source.eval_path, kind, source.columns) if source.eval_path else []
    return rows, eval_rows


def _generated(kind: str, source: ArithmeticSource) -> tuple[list[Row], list[Row]]:
    make = {
        "sft": arithmetic.sft_rows,
        "pairs": arithmetic.pair_rows,
        "steps": arithmetic.step_rows,
        "prompts": arithmetic.prompt_rows,
        "eval": arithmetic.prompt_rows,
    }[kind]

    def rows(count: int, split: arithmetic.Split) -> list[Row]:
        spec = arithmetic.ArithmeticSpec(
            seed=source.seed, rows=count, max_number=source.max_number, terms=source.terms, split=split
        )
        return make(spec)

    try:
        main = rows(source.rows, "heldout" if kind == "eval" else "train")
        return main, rows(source.eval_rows, "heldout") if source.eval_rows else []
    except ValueError as error:
        raise DataError(f"data set {kind}: {error}") from None


def read_columns(url: str, kind: str, columns: dict[str, str]) -> list[Row]:
    """The rows of a file, renamed to our columns. Extra columns are left out.

    Raises DataError with the row's number for a value that is missing, empty (NaN is) or of the wrong type.
    """
    rows = read_file(url)
    if not rows:
        raise DataError(f"data set {kind}: {url} has no rows; give a file with at least one")
    wanted = {name: columns.get(name, name) for name in DATASET_COLUMNS[kind]}
    present = {name for row in rows for name in row}
    missing = sorted(set(wanted.values()) - present)
    if missing:
        raise DataError(
            f"data set {kind}: {url} has no column {', '.join(missing)}; it has {', '.join(sorted(present))}; "
            f"map them with data.{kind}.columns, e.g. {{{DATASET_COLUMNS[kind][0]}: {sorted(present)[0]}}}"
        )
    picked = []
    for number, row in enumerate(rows, start=1):
        where = f"data set {kind}: row {number} of {url}"
        empty = [theirs for theirs in wanted.values() if _is_empty(row.get(theirs))]
        if empty:
            raise DataError(f"{where} has nothing in column {', '.join(empty)}; fill it")
        picked.append({ours: _typed(ours, row[theirs], f"{where}, column {theirs}") for ours, theirs in wanted.items()})
    return picked


def _is_empty(value: Any) -> bool:
    """What is missing, and how pandas writes it: NaN."""
    return value in (None, "", []) or (isinstance(value, float) and math.isnan(value))


def _typed(column: str, value: Any, where: str) -> Any:
    """The value if it has its column's type. A label that is a number becomes text: 7 and 7.0 are "7"."""
    if column == "steps":
        allowed, right = "a list of strings", isinstance(value, list) and all(isinstance(one, str) for one in value)
    elif column == "labels":
        allowed, right = "a list of booleans or numbers", isinstance(value, list) and all(map(_is_number, value))
    else:
        if column == "label" and _is_number(value) and not isinstance(value, bool):
            return str(int(value) if value == int(value) else value)
        allowed, right = "a string", isinstance(value, str)
    if right:
        return value
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        raise DataError(f"{where} holds a list of messages; conversations are not read yet: give {allowed}, one turn")
    raise DataError(f"{where} holds {_shown(value)}; give {allowed}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


def drop_equal_pairs(rows: list[Row]) -> tuple[list[Row], int]:
    """(the pairs whose responses differ, how many were dropped). Raises DataError where none are left."""
    kept = [row for row in rows if row["chosen"] != row["rejected"]]
    if rows and not kept:
        raise DataError(
            f"data set pairs: chosen and rejected are equal in all {len(rows)} rows; give pairs that differ"
        )
    return kept, len(rows) - len(kept)


def read_file(url: str) -> list[Row]:
    """All rows of a JSON (a list of objects), JSONL, CSV or Parquet file at a path or fsspec URL."""
    suffix = posixpath.splitext(url)[1].lower()
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    if suffix not in readers:
        raise DataError(f"data file {url} has the suffix {suffix or 'none'!r}; allowed: {', '.join(sorted(readers))}")
    try:
        with fsspec.open(url, "rb") as file:
            content = file.read()  # type: ignore[union-attr]
    except FileNotFoundError:
        raise DataError(f"data file {url} does not exist; give the path or s3:// URL of a data file") from None
    try:
        rows = readers[suffix](content)
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"data file {url} is not {suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"data file {url} holds rows that are not objects with named columns")
    return rows


def _read_json(content: bytes) -> list[Row]:
    rows = json.loads(content)
    if not isinstance(rows, list):
        raise ValueError("it holds no list of objects")
    return rows


def _read_jsonl(content: bytes) -> list[Row]:
    return [json.loads(line) for line in _lines(content.decode()) if line.strip()]


def _read_csv(content: bytes) -> list[Row]:
    reader = csv.DictReader(io.StringIO(content.decode()))
    rows: list[Row] = []
    for row in reader:
        if None in row:  # where the reader puts cells without a name
            raise ValueError(f"line {reader.line_num} has more cells than the header has names")
        rows.append({name: None if value in ("NaN", "nan") else value for name, value in row.items()})
    return rows


def _read_parquet(content: bytes) -> list[Row]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in _lines(path.read_text(encoding="utf-8"))]


def _lines(text: str) -> list[str]:
    """Lines as JSONL means them; str.splitlines would also cut at separators that may stand inside a string."""
    return text.removesuffix("\n").split("\n")
