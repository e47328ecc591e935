"""The mix of rewards: what each source gave, as measured and as trained on, and the weighted sum."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.config.rewards import RewardSettings


@dataclass(frozen=True)
class RewardMix:
    """The sum over sources of weight * value; the reward model's value is (score - mean) / std, over held-out scores.

    Sources: "rm" (raw score), "prm" (verdict on a response's steps), and those of `RewardSources`.
    """

    settings: RewardSettings
    rm_mean: float = 0.0
    rm_std: float = 1.0

    def values(self, sources: Mapping[str, float]) -> dict[str, float]:
        """Each source's value as it is weighted."""
        return {
            name: (value - self.rm_mean) / self.rm_std if name == "rm" else value for name, value in sources.items()
        }

    def total(self, sources: Mapping[str, float]) -> float:
        weights = self.settings.weights
        return sum(weights.get(name, 0.0) * value for name, value in self.values(sources).items())

    def totals(self, sources: Sequence[Mapping[str, float]]) -> list[float]:
        return [self.total(one) for one in sources]


def solution_verdict(steps: Sequence[float], aggregate: str) -> float:
    """One number for a solution from the probabilities that its steps are right; 0 for a solution without a step.

    aggregate: a value of `RewardSettings.prm_aggregate`. min and product: Lightman et al. 2023, appendix F.
    """
    return _AGGREGATES[aggregate](steps) if len(steps) else 0.0


_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": lambda steps: float(min(steps)),
    "mean": lambda steps: float(sum(steps) / len(steps)),
    "last": lambda steps: float(steps[-1]),
    "product": lambda steps: float(math.prod(steps)),
}
