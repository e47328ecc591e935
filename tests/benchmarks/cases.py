"""Finished cases of a benchmark in a JSON-lines file, so that a run that was stopped goes on where it was.

What other code measured does not count: each line holds a digest of the sources.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
BENCH = PROJECT / ".rlhf" / "bench"
MEASUREMENTS = PROJECT / "docs" / "measurements"


class Cases:
    """What was measured for each case."""

    def __init__(self, path: Path):
        self._path = path
        self._sources = sources_digest()
        self._done: dict[str, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            entry = json.loads(line)
            if entry["sources"] == self._sources:
                self._done[_name(entry["case"])] = entry["result"]

    def get(self, case: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._done.get(_name(case))

    def add(self, case: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Keeps the result for good before it is returned. Ends the benchmark if the sources changed meanwhile."""
        if sources_digest() != self._sources:
            raise SystemExit("the sources were changed while they were measured: run the benchmark again")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": dict(case), "result": result, "sources": self._sources}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._done[_name(case)] = result
        return result


def _name(case: Mapping[str, Any]) -> str:
    return json.dumps(dict(case), sort_keys=True)


def sources_digest() -> str:
    """Of the Python files that training runs, and of the tests that benchmarks share."""
    digest = hashlib.sha256()
    for folder in ("rlhf_core", "stages", "tests/rlhf_core/training", "tests/stages"):
        for path in sorted((PROJECT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(PROJECT)} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def write_measurement(name: str, lines: list[str]) -> None:
    """docs/measurements/<name>.md, and the same on the terminal."""
    MEASUREMENTS.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines)
    (MEASUREMENTS / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
