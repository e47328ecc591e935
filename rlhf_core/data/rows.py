"""Rows as JSON lines: what prepare-data writes and the trained stages read."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[Row]:
    return list(stream_jsonl(path))


def stream_jsonl(path: Path) -> Iterator[Row]:
    """The same, one row at a time."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def lines(text: str) -> list[str]:
    """Lines as JSONL means them; str.splitlines would also cut at separators that may stand inside a string."""
    return text.removesuffix("\n").split("\n")
