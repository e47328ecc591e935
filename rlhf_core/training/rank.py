"""What every trainer rank has: its process group, inputs from the store, and its part of a training checkpoint.

`start_trainers` makes a group of them on Ray; tests may start them by spawn: a rank is plain Python.
"""

import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.pipeline import ClusterSettings
from rlhf_core.config.training import ModelSource, TrainerSettings
from rlhf_core.store.artifacts import fetch
from rlhf_core.store.checkpoints import Checkpoint, Shards, download, upload_shards
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.leases import attach
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.training.capabilities import check_machine

if TYPE_CHECKING:
    from rlhf_core.cluster.workers import WorkerGroup
    from rlhf_core.data.token_cache import TokenTable

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """What a driver tells its ranks: settings, and where things are. `scratch` is a path on any node.

    tokens: "train" and, with held-out rows, "eval" -> key in the store's token cache (rlhf_core/data/token_cache.py).
    chat_template: the Jinja text of `text.chat_template`, a path of the driver's; None: the tokenizer's own.
    """

    stage: str
    key: str
    settings: Any
    store_url: str
    lease: int
    scratch: str
    manifests: dict[str, Manifest] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    def token_tables(self) -> dict[str, "TokenTable"]:
        """The tokens of each split that the driver has made; fetched to this node when they are not there yet."""
        from rlhf_core.data.token_cache import fetch_tokens

        store, directory = Store(self.store_url), Path(self.scratch) / "tokens"
        return {split: fetch_tokens(store, key, directory) for split, key in self.tokens.items()}

    def input_path(self, name: str) -> Path:
        """A verified local copy of an input artifact; made on this node when it is not there yet."""
        return fetch(Store(self.store_url), self.manifests[name], Path(self.scratch) / "inputs" / name)


class TrainerRank(ABC):
    """Base of the trainers. Subclasses add `load()`, their steps, `_save(directory)` and `_restore(directory)`."""

    def __init__(self, rank: int, ranks: int, job: Job):
        self.rank, self.ranks, self.job = rank, ranks, job
        self._rendezvous: Any = None

    def open_rendezvous(self, host: str) -> int:
        """Rank 0: opens the process group's store and returns its port."""
        from rlhf_core.training import process

        self._rendezvous = process.open_rendezvous(host, self.ranks)
        return self._rendezvous.port

    def join(self, host: str, port: int) -> None:
        from rlhf_core.training import process

        if self.job.settings.trainer.deterministic:
            process.make_deterministic()
        process.join(self.rank, self.ranks, host, port, self._rendezvous)

    def peak_memory_gib(self) -> dict[str, float]:
        from rlhf_core.training import process

        return process.peak_memory_gib()

    def save_checkpoint(self, step: int) -> Shards:
        """Writes this rank's shards to node-local scratch and uploads them."""
        from rlhf_core.training import process

        store = Store(self.job.store_url)
        lease = attach(store, self.job.stage, self.job.key, self.job.lease)
        with tempfile.TemporaryDirectory(dir=self.job.scratch, prefix=f"save-{self.rank}-") as temp:
            self._save(Path(temp))
            process.save_rng(Path(temp), self.rank)
            return upload_shards(store, self.job.stage, self.job.key, step, temp, lease)

    def restore_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Loads what all ranks saved, from a verified copy that the ranks of a node share while they load."""
        from rlhf_core.training import process

        first = process.first_on_node()
        directory = Path(self.job.scratch) / f"load-{first}"
        if self.rank == first:
            shutil.rmtree(directory, ignore_errors=True)  # what a kill left
            download(Store(self.job.store_url), checkpoint, directory)
        process.barrier()
        self._restore(directory)
        process.load_rng(directory, self.rank)
        process.barrier()
        if self.rank == first:
            shutil.rmtree(directory)

    @abstractmethod
    def _save(self, directory: Path) -> None:
        """Writes this rank's shards; names differ between ranks, or hold the same and come from rank 0 alone."""

    @abstractmethod
    def _restore(self, directory: Path) -> None:
        """Loads from a directory with the files of all ranks."""


def start_trainers(target: str, job: Job, trainer: TrainerSettings, cluster: ClusterSettings) -> "WorkerGroup":
    """A group of `trainer.ranks` ranks of class `target` ("module:Class"), joined in one process group.

    Raises SettingsError for what this machine or installation cannot run.
    """
    from rlhf_core.cluster.limit import start_limit
    from rlhf_core.cluster.session import ClusterError
    from rlhf_core.cluster.workers import WorkerGroup, rank_environment

    environment = rank_environment()
    check_machine(job.settings, cuda=environment["gpus_per_rank"] > 0)
    group = WorkerGroup(
        "trainer",
        target,
        trainer.ranks,
        events=Path(job.scratch) / "events.jsonl",
        start_timeout_s=cluster.start_timeout_s,
        **environment,
    )
    limit = start_limit(cluster)
    try:
        group.call("__init__", per_rank=[(rank, trainer.ranks, job) for rank in range(trainer.ranks)], timeout_s=limit)
        host = LOOPBACK if cluster.address is None else group.node_address(0)
        port = group.call_rank(0, "open_rendezvous", host, timeout_s=limit)
        group.call("join", host, port, timeout_s=limit)
    except ClusterError:
        group.close()  # its actors would hold the accelerators
        raise
    return group


def base_model_directory(source: ModelSource, scratch: str, rank: int | str) -> Path:
    """The Hugging Face directory that a chain starts from: the given one, that of a model of the hub in this node's
    cache, or a small Llama written here.

    rank: whose copy it is, a rank's or the "driver"'s. To be called before the process group exists: once it does,
    transformers saves on rank 0 alone. Raises SettingsError for a model that the hub does not give.
    """
    if source.path is not None:
        return Path(source.path)
    if source.hub is not None:
        from rlhf_core.models.hub import fetch_model

        return fetch_model(source.hub, source.revision)
    from rlhf_core.models.scratch import write_scratch_model

    assert source.scratch is not None  # the settings model admits no other case
    name = sha256_text(canonical_json(source.scratch.model_dump()))[:12]  # a reference may be another one
    directory = Path(scratch) / f"base-{rank}-{name}"
    if not directory.exists():
        write_scratch_model(directory, **source.scratch.model_dump())
    return directory
