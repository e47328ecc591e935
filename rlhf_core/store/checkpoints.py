"""Training checkpoints in the store: training/<stage>/<key>/step-000040/..., whole once COMPLETE is there.

Every rank uploads its own files, a barrier follows, then rank 0 writes COMPLETE, which lists them all.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.store.backends import StoreError
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store

Better = Literal["lower", "higher"]

_COMPLETE = "COMPLETE"
_STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """`path` is store-relative; `files`: path relative to it, to SHA-256; `extra`: what `complete` was given.

    `metric`: the value, by which checkpoints are compared, that an evaluation of exactly these weights gave. `size`:
    of all files together, bytes.
    """

    step: int
    path: str
    files: dict[str, str]
    extra: dict[str, Any]
    metric: float | None = None
    size: int = 0


@dataclass(frozen=True)
class Shards:
    """Files of one rank or of several: path relative to the step's directory, to SHA-256; and their size, bytes."""

    files: dict[str, str]
    size: int

    def __add__(self, other: "Shards") -> "Shards":
        return Shards(self.files | other.files, self.size + other.size)


def _training_path(stage: str, key: str) -> str:
    return f"training/{stage}/{key}"


def _step_path(stage: str, key: str, step: int) -> str:
    return f"{_training_path(stage, key)}/step-{step:06d}"


def upload_shards(
    store: Store, stage: str, key: str, step: int, local_dir: str | Path, lease: Lease | None = None
) -> Shards:
    """Uploads one rank's files. Returns what `complete` wants to know of them.

    Names must differ between ranks. A COMPLETE of the same step, which another lease's holder may have left, goes
    first: from here on the directory is a mixture. Raises LeaseLost, before touching anything, when `lease` is given
    and no longer in force.
    """
    if lease is not None:
        lease.check()
    path = _step_path(stage, key, step)
    store.delete_file(f"{path}/{_COMPLETE}")
    files = store.upload_dir(local_dir, path)
    return Shards(files, sum((Path(local_dir) / name).stat().st_size for name in files))


def complete(
    store: Store,
    stage: str,
    key: str,
    step: int,
    shards: Shards,
    extra: dict[str, Any],
    lease: Lease | None,
    metric: float | None = None,
) -> None:
    """Marks the step whole. Rank 0 calls it, after every rank's `upload_shards` returned, with the sum of them.

    `extra`: JSON to be found again in `Checkpoint.extra`; `metric` is finite. Raises LeaseLost when `lease` is not in
    force any more.
    """
    if not shards.files:
        raise StoreError(
            f"checkpoint {_step_path(stage, key, step)} without files; upload the shards of every rank first"
        )
    content = {"step": step, "files": shards.files, "size": shards.size, "extra": extra, "metric": metric}
    data = json.dumps(content, indent=2, sort_keys=True, allow_nan=False).encode()
    if lease is not None:
        lease.check()
    store.write_bytes(f"{_step_path(stage, key, step)}/{_COMPLETE}", data)


def _steps(store: Store, stage: str, key: str) -> list[int]:
    """Steps that have a directory, whole or not, newest first."""
    matches = (_STEP_NAME.fullmatch(name) for name in store.list_names(_training_path(stage, key)))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _read_complete(store: Store, stage: str, key: str, step: int) -> Checkpoint | None:
    path = _step_path(stage, key, step)
    try:
        content = json.loads(store.read_bytes(f"{path}/{_COMPLETE}"))
        checkpoint = Checkpoint(
            step=int(content["step"]),
            path=path,
            files=dict(content["files"]),
            extra=dict(content["extra"]),
            metric=content.get("metric"),
            size=int(content.get("size", 0)),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return checkpoint if checkpoint.step == step else None


def newest_complete(store: Store, stage: str, key: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, or None, and the names of the newer directories that are not whole, newest first."""
    skipped: list[str] = []
    for step in _steps(store, stage, key):
        checkpoint = _read_complete(store, stage, key, step)
        if checkpoint is not None:
            return checkpoint, skipped
        skipped.append(f"step-{step:06d}")
    return None, skipped


def best_complete(store: Store, stage: str, key: str, better: Better) -> Checkpoint | None:
    """The whole checkpoint with the best metric, the earliest of equals; None where none has one."""
    return _best(_whole(store, stage, key), better)


def _best(checkpoints: list[Checkpoint], better: Better) -> Checkpoint | None:
    sign = -1 if better == "higher" else 1
    measured = [(sign * c.metric, c.step, c) for c in checkpoints if c.metric is not None]
    return min(measured)[2] if measured else None


def _whole(store: Store, stage: str, key: str) -> list[Checkpoint]:
    """Newest first."""
    found = (_read_complete(store, stage, key, step) for step in _steps(store, stage, key))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def download(store: Store, checkpoint: Checkpoint, dest: str | Path) -> Path:
    """Makes `dest` the checkpoint's directory, every SHA-256 verified; see `Store.download_verified`."""
    return store.download_verified(checkpoint.path, checkpoint.files, dest)


def rotate(
    store: Store, stage: str, key: str, keep: int, better: Better = "lower", max_size: int | None = None
) -> list[str]:
    """Deletes all but the newest `keep` whole checkpoints and the one with the best metric; of those, the oldest while
    all are larger than `max_size` bytes together, but never the newest and the best; and what is not whole and older
    than the newest whole one.

    Without a whole checkpoint nothing is deleted. The marker goes first, so that a kill half-way leaves none that
    only looks whole. Returns the names of the deleted directories.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} checkpoints; at least 1 is kept")
    whole = _whole(store, stage, key)
    if not whole:
        return []
    kept = {checkpoint.step for checkpoint in _kept(whole, keep, better, max_size)}
    deleted: list[str] = []
    for step in _steps(store, stage, key):
        if step > whole[0].step or step in kept:
            continue
        path = _step_path(stage, key, step)
        store.delete_file(f"{path}/{_COMPLETE}")
        store.delete_dir(path)
        deleted.append(f"step-{step:06d}")
    return deleted


def _kept(whole: list[Checkpoint], keep: int, better: Better, max_size: int | None) -> list[Checkpoint]:
    """What `rotate` leaves of the whole checkpoints, which come newest first."""
    best = _best(whole, better)
    always = {whole[0].step, *([best.step] if best else [])}
    kept = [checkpoint for n, checkpoint in enumerate(whole) if n < keep or checkpoint.step in always]
    for oldest in reversed(kept):
        if max_size is None or sum(checkpoint.size for checkpoint in kept) <= max_size:
            break
        if oldest.step not in always:
            kept = [checkpoint for checkpoint in kept if checkpoint is not oldest]
    return kept
