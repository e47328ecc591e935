"""The bits of parameters as they were, of which each rank keeps its own part."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class KeptWeights:
    """Parameters' bits in host memory: over the data-parallel ranks each element once (under ZeRO-3, with padding).

    Every rank makes the same calls.
    """

    def __init__(self, engine: Any, parameters: Sequence[Any]):
        self._engine, self._parameters = engine, parameters
        self._partitioned = engine.zero_optimization_stage() == 3
        self.parts = [self._part(parameter) for parameter in parameters]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, part in zip(self._parameters, self.parts, strict=True):
            if self._partitioned:
                _put_into_partition(parameter, part)
            else:
                parameter.copy_(self._whole(parameter, part))

    def _part(self, parameter: Any) -> Tensor:
        if self._partitioned:
            return parameter.ds_tensor.detach().cpu().clone()
        values = parameter.detach().reshape(-1).view(torch.uint8)
        start, stop = self._share(len(values))
        return values[start:stop].cpu().clone()

    def _whole(self, parameter: Any, part: Tensor) -> Tensor:
        """The parameter from all ranks' bytes, of which a sum with zeros changes none."""
        full = torch.zeros(parameter.nbytes, dtype=torch.uint8, device=parameter.device)
        start, stop = self._share(len(full))
        full[start:stop] = part.to(full.device)
        dist.all_reduce(full, group=self._engine.seq_data_parallel_group)
        return full.view(parameter.dtype).view(parameter.shape)

    def _share(self, count: int) -> tuple[int, int]:
        group = self._engine.seq_data_parallel_group
        size = -(-count // dist.get_world_size(group))
        start = min(dist.get_rank(group) * size, count)
        return start, min(start + size, count)


def _put_into_partition(parameter: Any, part: Tensor) -> None:
    parameter.ds_tensor.copy_(part)
    # Whole copies that DeepSpeed keeps of small parameters, and ZeRO++'s second partition, are of what was there
    # before: gone, they are made anew from the first partition at the next forward pass.
    parameter.partition()
    parameter.ds_secondary_tensor = None
