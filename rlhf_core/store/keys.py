"""Stage keys and content fingerprints: what can be known about a stage before it runs."""

import contextlib
import hashlib
import json
import math
import os
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

# A file that changed this recently may change again within one tick of its file system's clock, unseen by mtime_ns.
_RACY_NS = 2_000_000_000
_STAGE_NAME = re.compile(r"[a-z][a-z0-9-]*")


def canonical_json(obj: Any) -> str:
    """One text for one value: keys sorted, no whitespace, ASCII, floats by repr.

    Raises TypeError for anything JSON has no type for (tuples, enums, NumPy scalars, keys that are no strings), since
    two such values may print alike, and ValueError for NaN and infinities. The message gives the place in `obj`.
    """
    _check_json(obj, "$")
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _check_json(value: Any, where: str) -> None:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value!r}; canonical JSON holds finite numbers only")
    elif kind is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif kind is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError(f"{where} has the key {name!r} of type {type(name).__name__}; JSON keys are strings")
            _check_json(item, f"{where}.{name}")
    else:
        raise TypeError(
            f"{where} is a {kind.__name__}; allowed are None, bool, int, float, str, list and dict "
            "(dump a pydantic model with mode='json')"
        )


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_stage_name(stage: str) -> None:
    """Raises ValueError unless `stage` can stand in a store path."""
    if not _STAGE_NAME.fullmatch(stage):
        raise ValueError(f"stage name {stage!r}; a name is lower-case letters, digits and '-', such as 'sft'")


@dataclass(frozen=True)
class StageKey:
    """`key`: 64 hex digits, the SHA-256 of the canonical JSON of `source`."""

    key: str
    source: dict[str, Any] = field(hash=False)


def stage_key(
    *,
    stage: str,
    version: int,
    settings: dict[str, Any],
    inputs: dict[str, str],
    data: dict[str, str],
    code: dict[str, str],
    salt: str = "",
) -> StageKey:
    """The key of a stage's artifact, before anything runs.

    `settings`: the non-neutral fields that differ from their default, as JSON. `inputs`: name to the key of an
    artifact of ours or the content digest or commit of a foreign model. `data`: name to fingerprint. `code`: name to
    SHA-256 of a user's file. `salt`: set by `force`; an empty one leaves no trace in the key.
    """
    check_stage_name(stage)
    for name, parts in (("inputs", inputs), ("data", data), ("code", code)):
        for part, value in parts.items():
            if type(value) is not str or not value:
                raise TypeError(
                    f"{name}[{part!r}] of stage {stage!r} is {value!r}; it must be a key, digest or fingerprint"
                )
    source = {
        "stage": stage,
        "version": version,
        "settings": settings,
        "inputs": inputs,
        "data": data,
        "code": code,
    }
    if salt:
        source["salt"] = salt
    text = canonical_json(source)
    # Parsed back, so that `source` is a copy which later changes of the arguments do not reach.
    return StageKey(key=sha256_text(text), source=json.loads(text))


def files_digest(files: dict[str, str]) -> str:
    """SHA-256 over the sorted (relative path, SHA-256) pairs of `files`, as canonical JSON."""
    return sha256_text(canonical_json([[path, files[path]] for path in sorted(files)]))


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, read anew."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, remembered by (path, size, mtime_ns) below $XDG_CACHE_HOME/rlhf-flows.

    The memory is one small file for each path, replaced whole, so that processes need no lock; without a writable
    cache directory the file is read each time. A file changed within the last two seconds is not remembered.
    """
    real = os.path.realpath(path)
    before = os.stat(real)
    wanted = {"path": real, "size": before.st_size, "mtime_ns": before.st_mtime_ns}
    entry = _cache_directory() / f"{sha256_text(os.fsencode(real).hex())}.json"
    known = _read_cache_entry(entry)
    if (
        known is not None
        and {name: known.get(name) for name in wanted} == wanted
        and isinstance(known.get("sha256"), str)
    ):
        return known["sha256"]
    digest = sha256_file(real)
    after = os.stat(real)
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if unchanged and time.time_ns() - after.st_mtime_ns > _RACY_NS:
        _write_cache_entry(entry, {**wanted, "sha256": digest})
    return digest


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rlhf-flows" / "fingerprints"


def _read_cache_entry(entry: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(entry.read_bytes())
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) else None


def _write_cache_entry(entry: Path, content: dict[str, Any]) -> None:
    temporary = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    # The cache is a convenience: a full or read-only home directory costs time, not the run.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(content))
            temporary.replace(entry)
        finally:
            temporary.unlink(missing_ok=True)


def directory_digest(path: str | os.PathLike[str]) -> str:
    """Content digest of a directory: SHA-256 over its sorted (relative path, SHA-256), links followed.

    Directories whose name starts with a dot are left out: they are a tool's notes (.git, .cache with download times),
    not content. Raises FileNotFoundError for a directory without files, NotADirectoryError for a file.
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"directory {str(path)!r} does not exist")
    if not root.is_dir():
        raise NotADirectoryError(f"{str(path)!r} is not a directory")
    files = {file.relative_to(root).as_posix(): file_fingerprint(file) for file in _visible_files(root)}
    if not files:
        raise FileNotFoundError(f"directory {str(path)!r} holds no files")
    return files_digest(files)


def _visible_files(root: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[str] = set()
    for parent, directories, names in os.walk(root, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            raise ValueError(
                f"directory {str(root)!r} reaches {real!r} twice through links; remove the link at {parent!r}"
            )
        seen.add(real)
        directories[:] = [name for name in directories if not name.startswith(".")]
        found += [Path(parent, name) for name in names]
    return found


def remote_fingerprint(url: str) -> str:
    """Fingerprint of the content behind an fsspec URL.

    Local paths (and file://): the content, as `file_fingerprint` or `directory_digest`. Object stores: SHA-256 over
    sorted (name relative to `url`, size, ETag), without reading a byte. Raises FileNotFoundError when nothing is
    there, ValueError when the store has no ETags.
    """
    if "://" not in url or url.startswith("file://"):
        local = Path(url.removeprefix("file://"))
        if not local.exists():
            raise FileNotFoundError(f"{url!r} does not exist")
        return directory_digest(local) if local.is_dir() else file_fingerprint(local)
    filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    found: dict[str, dict[str, Any]] = filesystem.find(root, detail=True)
    if not found:
        raise FileNotFoundError(f"{url!r} does not exist or holds no files")
    rows: list[list[Any]] = []
    for name in sorted(found):
        etag = found[name].get("ETag")
        if not isinstance(etag, str):
            raise ValueError(
                f"{url!r}: the store gives no ETag for {name!r}; copy the data to a directory or an S3 bucket"
            )
        relative = name.removeprefix(root).lstrip("/") or name.rsplit("/", 1)[-1]
        rows.append([relative, int(found[name]["size"]), etag.strip('"')])
    return sha256_text(canonical_json(rows))
