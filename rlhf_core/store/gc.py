"""What can go from a store: what nothing refers to, and has been so for longer than a limit.

Kept are: whatever is younger than the limit; what is pinned; what a promotion names; what a pipeline planned within the
limit (`note_use`); what a live lease's run reads or makes; and, of all that is kept, the inputs, and theirs. A token
cache is kept as long as rollouts that were dumped beside it, for a replay.
"""

import json
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Literal

from rlhf_core.store.artifacts import artifact_path, read_manifest
from rlhf_core.store.backends import FileInfo, StoreError
from rlhf_core.store.inventory import stage_keys
from rlhf_core.store.leases import holder
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store

Kind = Literal[
    "artifact",
    "unfinished attempt",
    "training checkpoint",
    "kept drawings",
    "training",
    "lease",
    "token cache",
    "note of use",
]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Garbage:
    """`path`: a directory or file, relative to the store; `size` bytes in all; `key` of the stage that it belongs to,
    or ''."""

    kind: Kind
    path: str
    size: int
    modified: float
    key: str
    why: str


def note_use(store: Store, flow_run: str, keys: list[str]) -> None:
    """A pipeline says which artifacts it will read or make, before it looks for the first: they count as used now."""
    store.write_bytes(f"runs/{flow_run}.json", json.dumps({"keys": keys}).encode())


def note_inputs(store: Store, stage: str, key: str, inputs: list[str]) -> None:
    """A stage's run says what it reads. Called with the lease in hand."""
    store.write_bytes(f"training/{stage}/{key}/inputs.json", json.dumps(inputs).encode())


def find_garbage(
    store: Store, older_than_s: float, pinned: Set[str] = frozenset(), clock: Clock = time.time
) -> list[Garbage]:
    """In an order in which it can be deleted. Deletes nothing.

    older_than_s: what is younger is kept. pinned: keys of artifacts to be kept. Raises StoreError for a manifest that
    cannot be read: what it refers to is unknown.
    """
    limit = clock() - older_than_s
    trees = _Trees(store)
    manifests = {key: manifest for (_, key), (manifest, _) in trees.artifacts.items() if manifest is not None}
    used = {manifest.key for manifest in manifests.values() if _age_of(trees, manifest) > limit}
    used |= pinned | _named_in(store, "runs", limit) | _named_in(store, "models", None)
    running = _Running(store, trees.training_keys, clock)
    kept = manifests.keys() if running.unknown else _with_inputs(used | running.keys, manifests)
    live, garbage = running.keys, list[Garbage]()
    for (stage, key), (manifest, files) in trees.artifacts.items():
        garbage += _of_artifact(stage, key, manifest, files, key in kept, key in live or key in pinned, limit)
    for stage, key in trees.training_keys:
        if key not in live:
            garbage += _of_training(store, stage, key, key in manifests, key in kept | used, limit)
    if not running.any:
        taken = {one.key for one in garbage if one.kind == "training"}
        needed = _tokens_of_dumps(store, [(stage, key) for stage, key in trees.training_keys if key not in taken])
        garbage += _of_directories(store, "cache/tokens", "token cache", limit, needed)
    garbage += [
        Garbage("note of use", f"runs/{info.path}", info.size, info.modified, "", "of a run that is over")
        for info in store.file_infos("runs")
        if info.modified <= limit
    ]
    return garbage


def collect(
    store: Store, older_than_s: float, pinned: Set[str] = frozenset(), clock: Clock = time.time
) -> Iterator[Garbage]:
    """Deletes what `find_garbage` finds, and yields each when it has gone.

    Before each deletion the leases and notes of use are read again: what a run has taken up meanwhile stays.
    """
    for one in find_garbage(store, older_than_s, pinned, clock):
        if one.kind != "note of use" and not _still_garbage(store, one, older_than_s, clock):
            continue
        _delete(store, one)
        yield one


def _still_garbage(store: Store, one: Garbage, older_than_s: float, clock: Clock) -> bool:
    running = _Running(store, stage_keys(store, "training"), clock)
    if one.kind == "artifact":
        return not running.unknown and one.key not in running.keys | _named_in(store, "runs", clock() - older_than_s)
    return not running.any if one.kind == "token cache" else one.key not in running.keys


def _delete(store: Store, one: Garbage) -> None:
    """What vouches for a directory goes first, so that a kill half-way leaves none that only looks whole."""
    if one.kind in ("lease", "note of use"):
        store.delete_file(one.path)
        return
    for marker in ("manifest.json", "COMPLETE", "COMPLETE.json"):
        store.delete_file(f"{one.path}/{marker}")
    store.delete_dir(one.path)


class _Trees:
    """What lies below artifacts/ and training/."""

    def __init__(self, store: Store):
        # Before the manifests: an artifact that is published in between is then seen as one that is kept.
        self.training_keys = stage_keys(store, "training")
        self.artifacts: dict[tuple[str, str], tuple[Manifest | None, list[FileInfo]]] = {}
        for stage, key in stage_keys(store, "artifacts"):
            files = store.file_infos(artifact_path(stage, key))
            self.artifacts[stage, key] = (read_manifest(store, stage, key), files)


class _Running:
    """Live leases. `keys`: what their runs make and read; `unknown`: whether one has not said yet what it reads."""

    def __init__(self, store: Store, training_keys: list[tuple[str, str]], clock: Clock):
        self.keys: set[str] = set()
        self.any = self.unknown = False
        for stage, key in training_keys:
            lease = holder(store, stage, key, clock=clock)
            if lease is None or not lease.alive:
                continue
            self.any = True
            self.keys.add(key)
            try:
                self.keys |= set(json.loads(store.read_bytes(f"training/{stage}/{key}/inputs.json")))
            except FileNotFoundError:
                self.unknown = True


def _age_of(trees: _Trees, manifest: Manifest) -> float:
    return _newest(trees.artifacts[manifest.stage, manifest.key][1])


def _newest(files: list[FileInfo]) -> float:
    return max((info.modified for info in files), default=0.0)


def _named_in(store: Store, top: str, limit: float | None) -> set[str]:
    """Keys in the JSON files below `top` that are younger than `limit`; of all of them without one."""
    named: set[str] = set()
    for info in store.file_infos(top):
        if limit is None or info.modified > limit:
            try:
                named |= set(_strings(json.loads(store.read_bytes(f"{top}/{info.path}"))))
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise StoreError(
                    f"{top}/{info.path} in store {store.url!r} is not JSON ({error}); repair or remove it"
                ) from None
    return named


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON value, and each part of one that is a path: a key is a part of an artifact's path."""
    if isinstance(value, str):
        yield from value.split("/")
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _with_inputs(used: Set[str], manifests: dict[str, Manifest]) -> set[str]:
    """Those of `used` that are published, their inputs, and so on."""
    kept: set[str] = set()
    left = [key for key in used if key in manifests]
    while left:
        key = left.pop()
        if key not in kept:
            kept.add(key)
            source = manifests[key].key_source.get("inputs")
            inputs = source.values() if isinstance(source, dict) else ()
            named = [*manifests[key].inputs.values(), *map(str, inputs)]
            left += [other for other in named if other in manifests]
    return kept


def _of_artifact(
    stage: str, key: str, manifest: Manifest | None, files: list[FileInfo], kept: bool, live: bool, limit: float
) -> Iterator[Garbage]:
    top = artifact_path(stage, key)
    if manifest is not None and not kept:
        why = "no artifact, promotion or run refers to it"
        yield Garbage("artifact", top, _size(files), _newest(files), key, why)
        return
    attempts: dict[str, list[FileInfo]] = {}
    for info in files:
        name, slash, _ = info.path.partition("/")
        if slash and (manifest is None or name != manifest.attempt):
            attempts.setdefault(name, []).append(info)
    for name, own in attempts.items():
        if not live and _newest(own) <= limit:
            yield Garbage("unfinished attempt", f"{top}/{name}", _size(own), _newest(own), key, "no manifest names it")


def _of_training(store: Store, stage: str, key: str, published: bool, kept: bool, limit: float) -> Iterator[Garbage]:
    """Of a key without a live lease: training checkpoints and drawings of an artifact that is kept, and leases; all of
    it where there is no artifact, or none that is kept. Logs and dumped rollouts stay as long as their artifact."""
    top = f"training/{stage}/{key}"
    files = store.file_infos(top)
    if not kept:
        if files and _newest(files) <= limit:
            why = "its artifact is not kept" if published else "begun, never finished, and nobody works on it"
            yield Garbage("training", top, _size(files), _newest(files), key, why)
        return
    groups: dict[str, list[FileInfo]] = {}
    for info in files:
        groups.setdefault(info.path.partition("/")[0], []).append(info)
    for name, own in groups.items():
        kind: Kind = "kept drawings" if name == "samples" else "training checkpoint"
        if published and (name == "samples" or name.startswith("step-")) and _newest(own) <= limit:
            yield Garbage(kind, f"{top}/{name}", _size(own), _newest(own), key, "its artifact is published")
    for info in groups.get("lease", []):
        if info.modified <= limit:
            yield Garbage("lease", f"{top}/{info.path}", info.size, info.modified, key, "released or expired")


def _tokens_of_dumps(store: Store, training_keys: list[tuple[str, str]]) -> set[str]:
    """Keys of the token caches that dumped rollouts were trained beside (rlhf_core/rollout/dump.py)."""
    needed: set[str] = set()
    for stage, key in training_keys:
        path = f"training/{stage}/{key}/rollouts/run.json"
        try:
            needed |= set(_strings(json.loads(store.read_bytes(path)).get("tokens", {})))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise StoreError(f"{path} in store {store.url!r} is not JSON ({error}); repair or remove it") from None
    return needed


def _of_directories(store: Store, top: str, kind: Kind, limit: float, needed: Set[str]) -> Iterator[Garbage]:
    for name in store.list_names(top):
        if name in needed:
            continue
        files = store.file_infos(f"{top}/{name}")
        if files and _newest(files) <= limit:
            yield Garbage(kind, f"{top}/{name}", _size(files), _newest(files), "", "made again when it is wanted")


def _size(files: list[FileInfo]) -> int:
    return sum(info.size for info in files)
