"""The receiving end of a transfer in vLLM's worker. Imported by vLLM alone, by the name that `register` gives it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf_core.rollout.weight_transfer import load_bucket


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each update names its file."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """path: one bucket, a safetensors file that the sampler has checked already."""

    path: str


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads buckets of a checkpoint's tensors into the live model, layer by layer.

    The layers were laid out anew for their kernels after the first load, so `load_weights` alone fails on a live model:
    the session puts them on the meta device, and restores each as soon as its tensors are there. Hence nothing may fail
    between start and finish, and everything is checked before start.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """There is no connection to open."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        load_weights = cast(Callable[..., Any], self.model.load_weights)
        load_weights(load_bucket(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """There is no connection to close."""


@torch.no_grad()
def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Rebuilds what the CPU's matrix product keeps of a head that shares the embedding's weight.

    On the CPU a head holds a packed copy of its weight. A transfer has the embedding alone, so the reload repacks the
    embedding and leaves the head with the old copy: half of the new policy, without an error.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        method = layer.quant_method
        tied = isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings
        if tied and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
