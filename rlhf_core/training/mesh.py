"""Where a rank stands: data-parallel ranks see different samples; tensor- and sequence-parallel peers share them.

Loads without torch.
"""

from dataclasses import dataclass

from rlhf_core.config.training import Dtype, TrainerSettings


@dataclass(frozen=True)
class Mesh:
    """Peers that share samples have consecutive ranks, as DeepSpeed's AutoTP and Ulysses have them."""

    data_rank: int
    data_ranks: int
    tensor: int
    sequence: int

    @property
    def peers(self) -> int:
        """Ranks that hold the same samples."""
        return self.tensor * self.sequence

    @property
    def divided(self) -> bool:
        """Whether several ranks work on one sample."""
        return self.peers > 1


def mesh_of(trainer: TrainerSettings, rank: int) -> Mesh:
    """The place of rank `rank` of trainer.ranks."""
    peers = trainer.tensor_parallel * trainer.sequence_parallel
    return Mesh(rank // peers, trainer.ranks // peers, trainer.tensor_parallel, trainer.sequence_parallel)


def zero_stage(dtype: Dtype, trainer: TrainerSettings, *, trained: bool = True) -> int:
    """The ZeRO stage that runs: at least 1 for low precision and for ranks that share samples.

    Below it DeepSpeed has neither float32 master weights nor a gradient norm over tensor-parallel ranks.
    """
    shared = trainer.tensor_parallel * trainer.sequence_parallel > 1
    return max(1, trainer.zero_stage) if trained and (dtype != "float32" or shared) else trainer.zero_stage
