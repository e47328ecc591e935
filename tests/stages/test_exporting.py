"""What the driver does with an export."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.backends import StoreError
from stages.exporting import export_model


class Rank0:
    """In the place of a worker group: rank 0 writes a model, of which `lost` files do not reach the driver's node."""

    def __init__(self, *lost: str):
        self._lost = lost

    def call(self, method: str, directory: str, *, timeout_s: float) -> list[Any]:
        assert method == "export"
        shape: dict[str, Any] = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16}
        write_scratch_model(Path(directory), **shape, max_position=16, seed=0)
        for name in self._lost:
            (Path(directory) / name).unlink()
        return [{"eos_token_id": 1}]


def test_a_whole_model_is_taken(tmp_path: Path) -> None:
    assert export_model(Rank0(), tmp_path, timeout_s=1) == {"eos_token_id": 1}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "part"),
    [
        (("config.json", "model.safetensors"), "config.json"),
        (("config.json",), "config.json"),
        (("model.safetensors",), r"weights \(\*.safetensors\)"),
    ],
)
def test_a_model_on_another_node_is_not_published(tmp_path: Path, lost: tuple[str, ...], part: str) -> None:
    with pytest.raises(StoreError, match=rf"the driver finds no {part} in .*: rank 0 is on another node; give a run"):
        export_model(Rank0(*lost), tmp_path, timeout_s=1)  # type: ignore[arg-type]
