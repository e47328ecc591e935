"""What prepare-data says of a data set: data_report.json, its figures, and the summary for the UI."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.config.shapes import DatasetKind
from rlhf_core.data.lengths import lengths_of
from rlhf_core.data.loading import LoadedData, Reading
from rlhf_core.data.rows import Row
from rlhf_core.tracking.plots import plot_histogram


def data_report(kind: DatasetKind, data: LoadedData) -> dict[str, Any]:
    """The report as JSON: counts, each source with what was dropped and why, lengths in characters, an example."""
    train = [source.train for source in data.sources]
    held_out = [source.held_out for source in data.sources if source.held_out is not None]
    used = {_digest(row) for row in data.rows}
    return {
        "dataset": kind,
        "rows": len(data.rows),
        "eval_rows": len(data.held_out),
        "rows_read": sum(reading.read for reading in train),
        "rows_dropped": _count_dropped(train),
        "eval_rows_dropped": _count_dropped(held_out),
        "duplicate_rows": _count_duplicates(row for source in data.sources for row in source.rows),
        "eval_rows_in_training": sum(_digest(row) in used for row in data.held_out),
        "sources": [
            {
                **_reading(source.train),
                "rows_held_out": len(source.held_out_rows) if source.held_out is None else 0,
                "rows_taken": taken,
                "eval": None if source.held_out is None else _reading(source.held_out),
            }
            for source, taken in zip(data.sources, data.taken, strict=True)
        ],
        "characters": asdict(lengths_of(row_lengths(data.rows))),
        "example": data.rows[0],
    }


def counts_of(report: dict[str, Any]) -> dict[str, int]:
    """The report's figures, as metrics."""
    names = ("rows", "eval_rows", "rows_dropped", "eval_rows_dropped", "duplicate_rows", "eval_rows_in_training")
    return {name: report[name] for name in names}


def row_lengths(rows: Iterable[Row]) -> list[int]:
    """Characters of the text in each row: of all its strings, those in messages and steps too."""
    return [_characters(_content(row)) for row in rows]


def summary_markdown(report: dict[str, Any]) -> str:
    """What the UI shows of a report."""
    lengths = report["characters"]
    lines = [
        f"**{report['dataset']}**: {report['rows']} rows, {report['eval_rows']} held out; "
        f"{report['duplicate_rows']} duplicates; "
        f"{lengths['min']} / {lengths['median']:.10g} / {lengths['max']} characters (min / median / max)",
        "",
        "| source | shape | read | dropped | taken |",
        "|---|---|---|---|---|",
    ]
    readings: list[dict[str, Any]] = []
    for source in report["sources"]:
        lines.append(_source_line(source, str(source["rows_taken"])))
        readings.append(source)
        if source["eval"] is not None:
            lines.append(_source_line(source["eval"], "held out"))
            readings.append(source["eval"])
    lines += [line for reading in readings for line in _unused_lines(reading)]
    if report["eval_rows_in_training"]:
        lines += ["", f"{report['eval_rows_in_training']} held-out rows are training rows as well."]
    lines += ["", *example_lines(report["example"])]
    return "\n".join(lines) + "\n"


def example_lines(row: Row) -> list[str]:
    """A row as a table in Markdown."""
    return ["| column | first row |", "|---|---|", *(f"| {name} | `{_cell(value)}` |" for name, value in row.items())]


def plot_lengths(path: Path, report: dict[str, Any]) -> None:
    """The lengths of a report's training rows as a histogram, PNG."""
    lengths = report["characters"]
    title = f"{report['dataset']}: {report['rows']} rows"
    plot_histogram(path, title, lengths["edges"], lengths["counts"], xlabel="characters in a row", ylabel="rows")


def _source_line(source: dict[str, Any], taken: str) -> str:
    dropped = "; ".join(
        f"{reason}: {one['items']} (first: row {one['first_row']})" for reason, one in source["dropped"].items()
    )
    return f"| {source['name']} | {source['shape']} | {source['rows_read']} | {dropped or 0} | {taken} |"


def _unused_lines(reading: dict[str, Any]) -> list[str]:
    """What was not read of a source, as a paragraph, where there is anything."""
    names = {"columns": reading["unused_columns"], "keys of messages": reading["unused_message_keys"]}
    said = [f"{what} {', '.join(f'`{name}`' for name in found)}" for what, found in names.items() if found]
    return ["", f"Not read in {reading['name']}: {'; '.join(said)}."] if said else []


def _cell(value: Any) -> str:
    """A value in a table's cell, one line of at most 300 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= 300 else text[:300] + "..."


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "name": reading.name,
        "shape": reading.shape,
        "rows_read": reading.read,
        "rows_kept": len(reading.rows),
        "dropped": {reason: asdict(dropped) for reason, dropped in reading.dropped.items()},
        "unused_columns": list(reading.unused_columns),
        "unused_message_keys": list(reading.unused_keys),
    }


def _count_dropped(readings: Iterable[Reading]) -> int:
    return sum(dropped.items for reading in readings for dropped in reading.dropped.values())


def _count_duplicates(rows: Iterable[Row]) -> int:
    """Rows that are equal to one before them."""
    digests = [_digest(row) for row in rows]
    return len(digests) - len(set(digests))


def _digest(row: Row) -> bytes:
    """What stands for a row's content: the texts of all rows would take as much memory again as the rows."""
    return hashlib.sha256(json.dumps(_content(row), sort_keys=True).encode()).digest()


def _content(row: Row) -> Row:
    """A prompt is the same whatever source it names."""
    return {name: value for name, value in row.items() if name != "source"}


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(item) for name, item in value.items() if name not in ("role", "type"))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
