"""The mix of rewards: raw scores by source, and the weighted sum that is trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.config.rl import RewardSettings


@dataclass(frozen=True)
class RewardMix:
    """weight_rm * (score - mean) / std + weight_exact * exact, mean and std being those of the RM's held-out scores."""

    settings: RewardSettings
    rm_mean: float
    rm_std: float

    def normalised_rm(self, score: float) -> float:
        return (score - self.rm_mean) / self.rm_std

    def total(self, sources: Mapping[str, float]) -> float:
        """`sources`: "rm" (raw score) and "exact" of one trajectory."""
        return self.settings.rm * self.normalised_rm(sources["rm"]) + self.settings.exact * sources["exact"]

    def totals(self, sources: Sequence[Mapping[str, float]]) -> list[float]:
        return [self.total(one) for one in sources]
