"""The float32 weights that the optimizer updates, as this rank holds them under each ZeRO stage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.training.parameters import bare_name


@dataclass(frozen=True)
class Fragment:
    """Elements start .. start + len(values) of a trained parameter, flattened. `values` is a view: (n,) float32.

    Over the data-parallel ranks the fragments of a parameter cover each element once.
    """

    name: str
    start: int
    values: Tensor


def fragments(engine: Any) -> Iterator[Fragment]:
    """This rank's part of the float32 weights of a DeepSpeed engine in training."""
    stage = engine.zero_optimization_stage()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        found = _FRAGMENT[stage](engine, parameter)
        if found is not None:
            start, values = found
            yield Fragment(bare_name(name), start, values.detach())


def whole(engine: Any, start: int, values: Tensor | None, shape: torch.Size) -> Tensor:
    """A tensor on every data-parallel rank, from each one's fragment (None: this rank has nothing of it)."""
    full = torch.zeros(shape.numel(), dtype=torch.float32, device=engine.device)
    if values is not None:
        full[start : start + len(values)] = values
    dist.all_reduce(full, group=engine.seq_data_parallel_group)
    return full.view(shape)


def _without_zero(engine: Any, parameter: Any) -> tuple[int, Tensor] | None:
    """Every rank has the whole parameter; each answers for an equal share of it."""
    group = engine.seq_data_parallel_group
    share = -(-parameter.numel() // dist.get_world_size(group))
    start = min(dist.get_rank(group) * share, parameter.numel())
    values = parameter.view(-1)[start : start + share]
    return (start, values) if len(values) else None


def _flat_partition(engine: Any, parameter: Any) -> tuple[int, Tensor] | None:
    """Stages 1 and 2: the optimizer holds a slice of all parameters laid end to end."""
    mapping = parameter._hp_mapping
    return None if mapping is None else (mapping.lp_fragment_address.start, mapping.hp_fragment)


def _own_partition(engine: Any, parameter: Any) -> tuple[int, Tensor] | None:
    """Stage 3: each parameter is split evenly, the last slice padded."""
    values = engine.optimizer.get_local_fp32_param(parameter)
    start = dist.get_rank(parameter.ds_process_group) * len(values)
    length = min(len(values), parameter.ds_numel - start)
    return (start, values[:length]) if length > 0 else None


_FRAGMENT: dict[int, Callable[[Any, Any], tuple[int, Tensor] | None]] = {
    0: _without_zero,
    1: _flat_partition,
    2: _flat_partition,
    3: _own_partition,
}
