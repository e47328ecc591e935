"""What attempts that have ended left on this machine: their scratch directories, Ray's files, weights in memory."""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.guardian import EVENTS, LOG, SPEC
from rlhf_core.cluster.leftovers import attempt_name, remove_leftovers
from rlhf_core.store.inventory import stage_keys
from rlhf_core.store.leases import holder
from rlhf_core.store.store import Store

_ATTEMPTS = re.compile(r".+-([0-9a-f]{12})")


@dataclass(frozen=True)
class OldAttempt:
    """An attempt's directory, `size` bytes, last written `modified` (unix seconds)."""

    path: Path
    size: int
    modified: float


def old_attempts(scratch: Path, store: Store, older_than_s: float) -> Iterator[OldAttempt]:
    """Directories of attempts (flows/supervisor.py) in which nothing was written for that long, and whose key no live
    lease has. Anything else in `scratch` is left out."""
    live = [key for stage, key in stage_keys(store, "training") if (one := holder(store, stage, key)) and one.alive]
    limit = time.time() - older_than_s
    for directory in sorted(scratch.glob("*/*")):
        match = _ATTEMPTS.fullmatch(directory.parent.name)
        ours = any((directory / name).is_file() for name in (SPEC, LOG, EVENTS))
        if match is None or not ours or any(key.startswith(match[1]) for key in live):
            continue
        states = [file.lstat() for file in directory.rglob("*")]
        modified = max(state.st_mtime for state in states)
        if modified <= limit:
            yield OldAttempt(directory, sum(state.st_size for state in states), modified)


def remove(attempt: OldAttempt) -> None:
    remove_leftovers(attempt_name(attempt.path))
    shutil.rmtree(attempt.path)
