"""A moving average of the weights in float32, kept by each rank for its own part of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_core.training.masters import Fragment, fragments, whole


class Ema:
    """average <- decay * average + (1 - decay) * weights after each optimizer step, from the weights at the start.

    Nothing is written to the engine, so training goes on as if the average were not there.
    """

    def __init__(self, engine: Any, decay: float):
        self._engine, self._decay = engine, decay
        self._average = {part.name: Fragment(part.name, part.start, part.values.clone()) for part in fragments(engine)}

    @torch.no_grad()
    def update(self) -> None:
        for part in fragments(self._engine):
            self._average[part.name].values.lerp_(part.values, 1 - self._decay)

    def whole(self, name: str, shape: torch.Size) -> Tensor:
        """The average of one trained parameter, on every data-parallel rank; each of them has to ask for it."""
        part = self._average.get(name)
        return whole(self._engine, part.start if part else 0, part.values if part else None, shape)

    def save(self, directory: Path, tensor_rank: int, rank: int) -> None:
        """This rank's part, by parameter and place: ranks of another number or ZeRO stage can load it."""
        own = {f"{part.name}@{part.start}": part.values.contiguous() for part in self._average.values()}
        directory.mkdir(parents=True, exist_ok=True)
        save_file(own, directory / f"ema-{tensor_rank}-{rank}.safetensors")

    def load(self, directory: Path, tensor_rank: int) -> None:
        """From what all ranks saved. Raises ValueError if they do not cover this rank's part."""
        missing = {name: len(part.values) for name, part in self._average.items()}
        for name, start, values in _saved(directory, tensor_rank):
            part = self._average.get(name)
            if part is None:
                continue
            first, last = max(start, part.start), min(start + len(values), part.start + len(part.values))
            if first < last:
                part.values[first - part.start : last - part.start] = values[first - start : last - start]
                missing[name] -= last - first
        lacking = sorted(name for name, count in missing.items() if count)
        if lacking:
            raise ValueError(f"{directory} has no moving average of {', '.join(lacking[:3])}; was ema_decay set?")


def _saved(directory: Path, tensor_rank: int) -> Iterator[tuple[str, int, Tensor]]:
    for path in sorted(directory.glob(f"ema-{tensor_rank}-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                name, start = key.rsplit("@", 1)
                yield name, int(start), file.get_tensor(key)
