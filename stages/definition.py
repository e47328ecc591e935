"""What a stage is: a name, a version, settings, and a function from (settings, inputs) to a directory of files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.base import Settings
from rlhf_core.config.pipeline import RunSettings
from rlhf_core.store.leases import Lease
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import EventLog


@dataclass(frozen=True)
class StageResult:
    """What a stage made. `files` is the directory that becomes the artifact."""

    files: Path
    metrics: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    summary: str = ""  # markdown for the UI


@dataclass(frozen=True)
class StageContext:
    """What a stage's function works with. `inputs` are verified local copies of the input artifacts."""

    node: str
    stage: str
    key: str
    settings: Any
    run: RunSettings
    store: Store
    lease: Lease
    scratch: Path
    inputs: dict[str, Path]
    manifests: dict[str, Manifest]
    events: EventLog


@dataclass(frozen=True)
class Stage:
    """`version` is raised by hand when the same settings and inputs would give another artifact."""

    name: str
    version: int
    module: str
    settings: type[Settings]
    pool: Literal["cpu", "gpu"]
    run: Callable[[StageContext], StageResult]
