"""What an RL run carries from rollout to rollout beside weights and optimizers. In every training checkpoint."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlhf_core.algorithms.shaping import RunningMoments

_FILE = "state.json"


@dataclass(frozen=True)
class RlState:
    """The same on every rank: each computes it from the whole rollout.

    rewards: of all rollouts so far, before shaping. reference_step: the rollout after which the reference became the
    policy; 0 while it is the one that training started from. ptx_position: rows of PPO-ptx so far, the position in
    their order.
    """

    kl_coef: float
    rewards: RunningMoments = field(default_factory=RunningMoments)
    reference_step: int = 0
    ptx_position: int = 0

    def save(self, directory: Path) -> None:
        (directory / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path) -> "RlState":
        values = json.loads((directory / _FILE).read_text())
        return cls(**{**values, "rewards": RunningMoments(**values["rewards"])})
