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
from rlhf_core.tracking.history import History
from rlhf_core.training.rank import Job


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
    key_source: dict[str, Any]
    settings: Any
    run: RunSettings
    store: Store
    lease: Lease
    scratch: Path
    inputs: dict[str, Path]
    manifests: dict[str, Manifest]
    events: EventLog

    @property
    def files(self) -> Path:
        """The directory that becomes the artifact."""
        return self.scratch / "artifact"

    def history(self) -> History:
        """The stage's metrics: in the artifact, and in TensorBoard and W&B where asked for. To be closed."""
        name = f"{self.node}-{self.key[:8]}"
        config = self.settings.model_dump(mode="json")
        return History(self.files, self.events, self.run.tracking, run_name=name, config=config)

    def job(self, tokens: dict[str, str] | None = None, chat_template: str | None = None) -> Job:
        """What the trainers' ranks are told. tokens: split -> key in the token cache."""
        return Job(
            stage=self.stage,
            key=self.key,
            settings=self.settings,
            store_url=self.store.url,
            lease=self.lease.n,
            scratch=str(self.scratch),
            manifests=self.manifests,
            tokens=tokens or {},
            chat_template=chat_template,
        )


@dataclass(frozen=True)
class Stage:
    """`version` is raised by hand when the same settings and inputs would give another artifact."""

    name: str
    version: int
    module: str
    settings: type[Settings]
    pool: Literal["cpu", "gpu"]
    run: Callable[[StageContext], StageResult]
