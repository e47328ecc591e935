"""The manifest: what an artifact is, where it came from and what its files are."""

import json
import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from rlhf_core.store.keys import check_stage_name, files_digest
from rlhf_core.store.store import check_relative

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

# Written by every stage while it runs: times and progress, not rows.
_JOURNALS = ("metrics.jsonl", "events.jsonl")


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest(BaseModel):
    """The last file of an artifact to be written. While it is missing, the artifact does not exist."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    schema_version: Literal[1] = 1
    stage: str
    key: Sha256
    key_source: dict[str, JsonValue]
    """The JSON whose SHA-256 is `key`."""
    attempt: str
    """The directory beside the manifest that holds the files; other ones are garbage."""
    inputs: dict[str, str] = {}
    """Input name to its key, or to the digest or commit of a foreign model."""
    files: dict[str, Sha256]
    """Path relative to the attempt's directory, to SHA-256."""
    content_digest: Sha256
    """See `content_digest`. Recorded, verified, compared; in no key."""
    data: dict[str, JsonValue] = {}
    """Fingerprints and row counts."""
    model: dict[str, JsonValue] | None = None
    """tokenizer_digest, chat_template_digest, bos/eos/pad ids, model_class, dtype, head (name, mean, std)."""
    metrics: dict[str, JsonValue] = {}
    """Final figures. A NaN or infinity, which JSON lacks, is kept as the string 'nan', 'inf' or '-inf'."""
    versions: dict[str, str] = {}
    """Package name to version."""
    git_commit: str | None = None
    flow_run: dict[str, JsonValue] = {}
    wall_seconds: float | None = None
    created_at: str = Field(default_factory=utc_now)
    """ISO 8601, UTC."""

    @field_validator("stage")
    @classmethod
    def _stage_is_a_name(cls, stage: str) -> str:
        check_stage_name(stage)
        return stage

    @field_validator("files")
    @classmethod
    def _paths_stay_inside(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            check_relative(path)
        return files

    @field_validator("metrics", mode="before")
    @classmethod
    def _name_non_finite(cls, metrics: Any) -> Any:
        return _without_non_finite(metrics)

    def to_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {name: _without_non_finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_non_finite(item) for item in value]
    return value


def content_digest(files: dict[str, str]) -> str:
    """SHA-256 over sorted (path, SHA-256) of what counts as content in an artifact's `files`.

    With a `model/` directory: its files, paths relative to it, so that it equals `keys.directory_digest` of the same
    directory. Else: the rows, `*.jsonl` without the journals metrics.jsonl and events.jsonl. An artifact with
    neither: all files.
    """
    model = {path.removeprefix("model/"): digest for path, digest in files.items() if path.startswith("model/")}
    rows = {path: digest for path, digest in files.items() if path.endswith(".jsonl") and path not in _JOURNALS}
    return files_digest(model or rows or files)
