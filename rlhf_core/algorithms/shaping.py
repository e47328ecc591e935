"""What happens to a trajectory's score before baselines. Legend: B trajectories."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RunningMoments:
    """Mean and sum of squared deviations of all scores so far: state that a training checkpoint holds."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def updated(self, values: Sequence[float]) -> "RunningMoments":
        """With a further batch, whose order does not matter (Chan et al. 1979)."""
        if not values:
            return self
        number, total = len(values), self.count + len(values)
        mean = math.fsum(values) / number
        squares = math.fsum((value - mean) ** 2 for value in values)
        delta = mean - self.mean
        return RunningMoments(
            total,
            self.mean + delta * number / total,
            self.squares + squares + delta**2 * self.count * number / total,
        )

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def normalised(self, scores: Tensor, eps: float = 1e-8) -> Tensor:
        """(scores - mean) / std. While all scores so far were equal, 0."""
        return (scores - self.mean) / max(self.std, eps)


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer: int, factor: float) -> Tensor:
    """(B,): 0 up to max_len - buffer tokens, falling linearly to -factor at max_len (DAPO: Yu et al. 2025, eq. 13).

    lengths: (B,), action tokens alone: what an environment wrote is not the policy's length.
    """
    over = (lengths.double() - (max_len - buffer)).clamp(0, buffer)
    return -factor * over / buffer


def truncation_penalised(scores: Tensor, truncated: Tensor, coef: float | None) -> Tensor:
    """Scores of responses that were cut off: times coef for coef in [0, 1], replaced by a coef below 0 (ProRL: Liu et
    al. 2025). None leaves all. scores: (B,). truncated: (B,) bool."""
    if coef is None:
        return scores
    return torch.where(truncated, scores * coef if coef >= 0 else torch.full_like(scores, coef), scores)
