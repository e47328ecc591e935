"""The trained model on its way into the artifact."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.training import LoraSettings
from rlhf_core.models.hub import missing_part
from rlhf_core.store.backends import StoreError

if TYPE_CHECKING:
    from rlhf_core.cluster.workers import WorkerGroup


def export_model(group: "WorkerGroup", files: Path, *, timeout_s: float) -> dict[str, Any]:
    """Has the ranks export their model to `files`/model; facts of it for the manifest.

    Raises StoreError where the model did not arrive, which an artifact without one would hide until it is used.
    """
    directory = files / "model"
    facts = group.call("export", str(directory), timeout_s=timeout_s)[0]
    missing = missing_part(directory)
    if missing is not None:
        raise StoreError(
            f"rank 0 exported the model, and the driver finds no {missing} in {directory}: rank 0 is on another node; "
            f"give a run.scratch that both nodes share, or start the stage on a node where rank 0 has room as well"
        )
    return facts


def adapter_facts(lora: LoraSettings | None, model: Path) -> dict[str, Any]:
    """What the manifest says of an exported adapter: its rank and scale, and the digest of the model it belongs to."""
    if lora is None:
        return {}
    base = json.loads((model / "adapter" / "base.json").read_text(encoding="utf-8"))
    return {"lora": {"rank": lora.rank, "alpha": lora.alpha, "base_digest": base["digest"]}}
