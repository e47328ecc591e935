"""Every digest that the store's manifests and markers give, against the bytes that are there. Files are streamed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rlhf_core.store.artifacts import artifact_path, read_manifest
from rlhf_core.store.backends import StoreError
from rlhf_core.store.inventory import stage_keys
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.manifest import Manifest, content_digest
from rlhf_core.store.store import Store


@dataclass(frozen=True)
class Finding:
    """What is wrong with a file; `ok` and `unfinished` are no faults. `path` is relative to the store.

    damaged: other bytes than its manifest says, or a manifest that is not one. missing: listed and not there.
    foreign: there, and listed nowhere. unfinished: an attempt or checkpoint that no manifest or marker vouches for.
    """

    path: str
    problem: Literal["ok", "damaged", "missing", "foreign", "unfinished"]
    detail: str = ""

    @property
    def fault(self) -> bool:
        return self.problem in ("damaged", "missing", "foreign")


def verify(store: Store) -> Iterator[Finding]:
    """One finding for each file of each artifact, training checkpoint and token cache. Memory does not grow with them.

    Safe beside running stages: what goes away meanwhile, marker and all, is left out.
    """
    for stage, key in stage_keys(store, "artifacts"):
        yield from _artifact(store, stage, key)
    for stage, key in stage_keys(store, "training"):
        top = f"training/{stage}/{key}"
        for name in store.list_names(top):
            if name.startswith("step-"):
                yield from _marked(store, f"{top}/{name}", "COMPLETE")
    for key in store.list_names("cache/tokens"):
        yield from _marked(store, f"cache/tokens/{key}", "COMPLETE.json")


def _artifact(store: Store, stage: str, key: str) -> Iterator[Finding]:
    top = artifact_path(stage, key)
    path = f"{top}/manifest.json"
    try:
        manifest = read_manifest(store, stage, key)
    except (StoreError, ValueError) as error:
        yield Finding(path, "damaged", str(error))
        return
    if manifest is None:
        for name in store.list_names(top):
            yield Finding(f"{top}/{name}", "unfinished", "no manifest names it")
        return
    wrong = _contradiction(manifest)
    yield Finding(path, "damaged", wrong) if wrong else Finding(path, "ok")
    for name in store.list_names(top):
        if name not in ("manifest.json", manifest.attempt):
            # Of two runs that published at once one attempt counts; a plain file is nobody's.
            kind = "unfinished" if store.list_files(f"{top}/{name}") else "foreign"
            yield Finding(f"{top}/{name}", kind, "the manifest names another attempt")
    yield from _files(store, f"{top}/{manifest.attempt}", manifest.files, path)


def _contradiction(manifest: Manifest) -> str:
    """What a manifest says of itself that cannot be, or ''."""
    if sha256_text(canonical_json(manifest.key_source)) != manifest.key:
        return "its key is not that of its key_source"
    if content_digest(manifest.files) != manifest.content_digest:
        return "its content_digest is not that of its files"
    return ""


def _marked(store: Store, directory: str, marker: str) -> Iterator[Finding]:
    """A directory that is whole once its marker is there, which lists its files (below `attempt`, where it has one)."""
    path = f"{directory}/{marker}"
    try:
        content = json.loads(store.read_bytes(path))
        files, attempt = dict(content["files"]), content.get("attempt")
    except FileNotFoundError:
        yield Finding(directory, "unfinished", f"no {marker}")
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield Finding(path, "damaged", f"not a marker of a whole directory: {error}")
        return
    yield Finding(path, "ok")
    if attempt is None:
        yield from _files(store, directory, files, path, beside={marker})
        return
    for name in store.list_names(directory):
        if name not in (marker, attempt):
            yield Finding(f"{directory}/{name}", "unfinished", f"{marker} names another attempt")
    yield from _files(store, f"{directory}/{attempt}", files, path)


def _files(
    store: Store,
    directory: str,
    files: Mapping[str, str],
    listed_in: str,
    beside: frozenset[str] | set[str] = frozenset(),
) -> Iterator[Finding]:
    present = set(store.list_files(directory)) - beside
    for name in sorted(present | files.keys()):
        path = f"{directory}/{name}"
        if name not in files:
            yield Finding(path, "foreign", f"{listed_in} does not list it")
            continue
        try:
            digest = store.digest(path)
        except FileNotFoundError:
            # Rotation and gc delete the marker first: without it nobody vouches for the file any more.
            if not store.exists(listed_in):
                return
            yield Finding(path, "missing", f"{listed_in} lists it")
            continue
        same = digest == files[name]
        yield Finding(path, "ok") if same else Finding(path, "damaged", f"SHA-256 {digest}, expected {files[name]}")
