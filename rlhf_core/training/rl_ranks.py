"""The trainers' ranks as one: trajectories are dealt out to them, and what they find comes back in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.cluster.limit import Limit
from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.training.experience import Judgement
from rlhf_core.training.mesh import mesh_of
from rlhf_core.training.rewarded import Rewarded
from rlhf_core.training.rl_batches import Share, rollout_layout, shares
from rlhf_core.training.rl_metrics import Clock, parity, throughput

RL_TRAINER = "rlhf_core.training.rl:RlTrainer"


@dataclass(frozen=True)
class RlRanks:
    """A group of RlTrainer ranks. Each call of theirs may take trainer.step_timeout_s."""

    group: WorkerGroup
    settings: PpoSettings

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.group.call(method, *args, timeout_s=self._limit)

    def judge(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """What the models of rewards say of each."""
        dealt = self._dealt(trajectories)
        return self._gathered("judge", self._start("judge", trajectories, dealt), dealt)

    def train(self, step: int, rollout: Sequence[Rewarded], clock: Clock) -> dict[str, float]:
        """Scores a rollout and makes all passes over it; metrics of that."""
        trajectories = [one.trajectory for one in rollout]
        dealt = self._dealt(trajectories)
        scoring = self._start("score", trajectories, dealt)
        scored = self._gathered("score", scoring, dealt)
        clock.lap("score")
        # The references go to the ranks, not the arrays: Ray hands those over through shared memory.
        graded = [one.graded for one in rollout]
        numbers = [share.numbers for share in dealt]
        trained = self.call("train", step, graded, numbers, *scoring)[0]
        clock.lap("train")
        tokens = self.settings.epochs * sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
        return {
            **parity(trajectories, [one.logprobs for one in scored]),
            **trained,
            **throughput("train", tokens, clock.laps["train"], self.group.size),
            **self._peak_memory(),
        }

    def _peak_memory(self) -> dict[str, float]:
        """Of the rank with most."""
        by_rank = self.call("peak_memory_gib")
        return {f"memory/{what}": max(one[what] for one in by_rank) for what in by_rank[0]}

    @property
    def _limit(self) -> Limit:
        return Limit(self.settings.trainer.step_timeout_s, "ppo.trainer.step_timeout_s")

    def _dealt(self, trajectories: Sequence[Trajectory]) -> list[Share]:
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
        return shares(lengths, rollout_layout(self.settings), mesh_of(self.settings.trainer, 0).peers)

    def _start(self, method: str, trajectories: Sequence[Trajectory], dealt: Sequence[Share]) -> list[Any]:
        """References to what each rank finds of its trajectories."""
        own = [([trajectories[i] for i in share.numbers], share.micro_batches) for share in dealt]
        return self.group.start(method, per_rank=own)

    def _gathered(self, method: str, references: list[Any], dealt: Sequence[Share]) -> list[Any]:
        """What the ranks found, in the order of the trajectories."""
        found = self.group.wait(references, method, timeout_s=self._limit)
        by_number = {
            number: one
            for share, own in zip(dealt, found, strict=True)
            for number, one in zip(share.numbers, own, strict=False)
        }
        return [by_number[number] for number in range(len(by_number))]
