"""The trained model on its way into the artifact."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
