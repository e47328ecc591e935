"""events.jsonl: the one channel from a stage's processes up to whoever watches it.

One JSON object a line, appended in one write, so that several processes of a node can share a file:
phase(name), progress(step, total, phase), metrics(step, values), sample(prompt, response, ...), summary(markdown),
error(role, rank, message, traceback).
"""

import json
import os
import time
import traceback as tb
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EVENT_TYPES = ("phase", "progress", "metrics", "sample", "summary", "error")


class EventLog:
    """Appends events to `path`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: Any) -> None:
        if event not in EVENT_TYPES:
            raise ValueError(f"event type {event!r} is not one of {', '.join(EVENT_TYPES)}")
        line = json.dumps({"time": round(time.time(), 3), "type": event, **fields}, default=_plain) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def phase(self, name: str) -> None:
        self.write("phase", name=name)

    def progress(self, step: int, total: int, phase: str) -> None:
        self.write("progress", step=step, total=total, phase=phase)

    def metrics(self, step: int, values: Mapping[str, float], phase: str = "train") -> None:
        self.write("metrics", step=step, phase=phase, values=dict(values))

    def error(self, error: BaseException, role: str, rank: int | None = None) -> None:
        """The exception as an event; written where it was raised, before anything is torn down."""
        self.write(
            "error",
            role=role,
            rank=rank,
            kind=type(error).__name__,
            message=" ".join(str(error).split()) or type(error).__name__,
            traceback="".join(tb.format_exception(error)),
        )


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """All whole lines of an event file; a last line that is still being written is left out."""
    file = Path(path)
    if not file.exists():
        return
    *lines, _unfinished = file.read_text(encoding="utf-8").split("\n")
    for line in lines:
        yield json.loads(line)


def first_error(path: str | Path) -> dict[str, Any] | None:
    """The first error that any process wrote: the cause, where later ones are its consequences."""
    return next((event for event in read_events(path) if event["type"] == "error"), None)


def _plain(value: Any) -> Any:
    """NumPy and torch scalars as numbers."""
    return value.item()
