"""Publishing and fetching artifacts.

artifacts/<stage>/<key>/<attempt>/... holds the files, artifacts/<stage>/<key>/manifest.json names the attempt that
counts. The manifest is created last and conditionally: the first to commit wins, and nothing published is ever
overwritten.
"""

import uuid
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.store.backends import StoreError
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.leases import Lease
from rlhf_core.store.manifest import Manifest, content_digest, utc_now
from rlhf_core.store.store import Store


def artifact_path(stage: str, key: str) -> str:
    return f"artifacts/{stage}/{key}"


def _manifest_path(stage: str, key: str) -> str:
    return f"{artifact_path(stage, key)}/manifest.json"


def read_manifest(store: Store, stage: str, key: str) -> Manifest | None:
    """None when nothing was published. Raises StoreError, naming the path, for a manifest that cannot be read as this
    one.
    """
    path = _manifest_path(stage, key)
    try:
        data = store.read_bytes(path)
    except FileNotFoundError:
        return None
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StoreError(
            f"{path} in store {store.url!r} is not a manifest of schema 1: {where}: {first['msg']}"
        ) from error
    if (manifest.stage, manifest.key) != (stage, key):
        raise StoreError(f"{path} in store {store.url!r} says that it is {manifest.stage}/{manifest.key}: damaged")
    return manifest


def publish(store: Store, *, local_dir: str | Path, manifest_fields: dict[str, Any], lease: Lease | None) -> Manifest:
    """Uploads `local_dir` and commits it under its key. Returns the manifest that counts, which may be another
    attempt's.

    `manifest_fields`: the fields of `Manifest` but for attempt, files and content_digest, which are filled here. They
    are validated before anything is uploaded. Raises LeaseLost, before committing, when `lease` is no longer in
    force; ValueError for bad fields.
    """
    attempt = uuid.uuid4().hex
    draft = Manifest(**manifest_fields, attempt=attempt, files={}, content_digest="0" * 64)
    if sha256_text(canonical_json(draft.key_source)) != draft.key:
        raise ValueError(
            f"key {draft.key} of stage {draft.stage!r} is not that of its key_source; pass both from one StageKey"
        )
    if not any(path.is_file() for path in Path(local_dir).rglob("*")):
        raise StoreError(f"{str(local_dir)!r} holds no files to publish as {draft.stage}/{draft.key}")
    winner = read_manifest(store, draft.stage, draft.key)
    if winner is not None:
        return winner
    if lease is not None:
        lease.check()
    files = store.upload_dir(local_dir, f"{artifact_path(draft.stage, draft.key)}/{attempt}")
    created_at = manifest_fields.get("created_at") or utc_now()
    manifest = draft.model_copy(
        update={"files": files, "content_digest": content_digest(files), "created_at": created_at}
    )
    data = Manifest.model_validate(manifest.model_dump()).to_bytes()
    if lease is not None:
        lease.check()
    store.create(_manifest_path(draft.stage, draft.key), data)
    # Whatever `create` answered, the file decides: see Store.create.
    winner = read_manifest(store, draft.stage, draft.key)
    if winner is None:
        raise StoreError(
            f"{_manifest_path(draft.stage, draft.key)} vanished from store {store.url!r} after it was written"
        )
    return winner


def fetch(store: Store, manifest: Manifest, dest_dir: str | Path) -> Path:
    """Makes `dest_dir` the artifact's directory, every SHA-256 verified; see `Store.download_verified`.

    Raises StoreError naming the file that is missing or damaged.
    """
    path = f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}"
    return store.download_verified(path, manifest.files, dest_dir)
