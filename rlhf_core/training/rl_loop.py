"""PPO's loop: sample, score, reward, train, send the weights. The driver of one trainer group and one sampler."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.batches import SampleOrder, rank_slice
from rlhf_core.rollout.prompts import Prompt, completion_text, greedy_requests, rollout_requests
from rlhf_core.rollout.rewards import RewardMix, solution_verdict
from rlhf_core.rollout.sample import Sample
from rlhf_core.rollout.trajectory import Trajectory, single_turn
from rlhf_core.rollout.verifiers import exact
from rlhf_core.rollout.weight_transfer import transfer_directory
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.experience import Scored
from rlhf_core.training.progress import finish_checkpoint, resume_point
from rlhf_core.training.rank import Job

RL_TRAINER = "rlhf_core.training.rl:RlTrainer"


@dataclass
class PpoRun:
    """One run of PPO in exact mode: a step is a function of the weights before it, the seed and its number.

    What moves whole checkpoints (restoring, saving) may take start_timeout_s; a step's parts, step_timeout_s each.
    """

    job: Job
    trainers: WorkerGroup
    sampler: WorkerGroup
    tokenizer: Any
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    mix: RewardMix
    history: History
    store: Store
    lease: Lease
    start_timeout_s: float

    @cached_property
    def _order(self) -> SampleOrder:
        return SampleOrder(len(self.prompts), self.settings.seed)

    @property
    def settings(self) -> PpoSettings:
        return self.job.settings

    def run(self) -> dict[str, Any]:
        """All steps, from the newest complete training checkpoint. Returns what was measured first and last."""
        settings, events = self.settings, self.history.events
        start = resume_point(self.trainers, self.job, self.store, self.history, timeout_s=self.start_timeout_s)
        self._send_weights(start)
        if start == 0:
            self._evaluate(0)
        events.phase("training")
        for step in range(start + 1, settings.steps + 1):
            self.history.add(step, self._step(step))
            last = step == settings.steps
            if last or (settings.eval_steps and step % settings.eval_steps == 0):
                self._evaluate(step)
            events.progress(step, settings.steps, "training")
            if settings.trainer.saves_at(step, settings.steps):
                self._checkpoint(step)
        return self._measured()

    def _checkpoint(self, step: int) -> None:
        trainer = self.settings.trainer
        finish_checkpoint(
            self.trainers,
            self.job,
            self.store,
            self.lease,
            self.history,
            step,
            trainer,
            timeout_s=self.start_timeout_s,
        )

    def _step(self, step: int) -> dict[str, float]:
        """One rollout and the passes over it; leaves the sampler with the new weights."""
        limit = self.settings.trainer.step_timeout_s
        clock = _Clock()
        trajectories, texts, labels = self._rollout(step)
        clock.lap("rollout")
        ranks = self.trainers.size
        shards = [rank_slice(range(len(trajectories)), rank, ranks) for rank in range(ranks)]
        scoring = self.trainers.start("score", per_rank=[([trajectories[i] for i in shard],) for shard in shards])
        scored = [one for shard in self.trainers.wait(scoring, "score", timeout_s=limit) for one in shard]
        sources = [
            {**self._judged(one), "exact": exact(text, label)}
            for one, text, label in zip(scored, texts, labels, strict=True)
        ]
        rewards = self.mix.totals(sources)
        clock.lap("score")
        # The references go to the ranks, not the arrays: Ray hands those over through shared memory.
        trained = self.trainers.call("train", step, rewards, *scoring, timeout_s=limit)[0]
        clock.lap("train")
        self._send_weights(step)
        clock.lap("transfer")
        self._show_sample(step, trajectories[0].prompt_id, texts[0], rewards[0], scored[0].step_scores)
        return {
            **_rollout_metrics(trajectories, [self.mix.values(one) for one in sources], rewards),
            **_step_metrics(scored),
            **_parity(trajectories, [one.logprobs for one in scored]),
            **trained,
            **clock.laps,
        }

    def _judged(self, scored: Scored) -> dict[str, float]:
        """What the models of rewards gave: those that this run has."""
        judged: dict[str, float] = {}
        if "reward" in self.job.manifests:
            judged["rm"] = scored.reward_score
        if scored.step_scores is not None:
            judged["prm"] = solution_verdict(scored.step_scores.tolist(), self.settings.reward.prm_aggregate)
        return judged

    def _rollout(self, step: int) -> tuple[list[Trajectory], list[str], list[str]]:
        """Trajectories of the step's prompts, their texts and labels."""
        rollout = self.settings.rollout
        chosen = [self.prompts[i] for i in self._order.ids((step - 1) * rollout.prompts, rollout.prompts)]
        requests = rollout_requests(
            chosen,
            samples_per_prompt=rollout.samples_per_prompt,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            seed=self.settings.seed,
            step=step,
            stop_token_id=self.tokenizer.eos_token_id,
        )
        samples = self._generate(requests)
        groups = [number // rollout.samples_per_prompt for number in range(len(requests))]
        trajectories = [
            single_turn(request, sample, group_id=group, prompt_id=chosen[group].prompt_id)
            for request, sample, group in zip(requests, samples, groups, strict=True)
        ]
        texts = [completion_text(self.tokenizer, sample.token_ids) for sample in samples]
        return trajectories, texts, [chosen[group].label for group in groups]

    def _generate(self, requests: list[Any]) -> list[Sample]:
        return self.sampler.call("generate", requests, timeout_s=self.settings.generate_timeout_s)[0]

    def _send_weights(self, version: int) -> None:
        """The policy's weights into the sampler."""
        limit = self.settings.trainer.step_timeout_s
        with transfer_directory(self.job.scratch) as directory:
            index = self.trainers.call("write_weights", str(directory), version, timeout_s=limit)[0]
            self.sampler.call("update_weights", index, timeout_s=limit)

    def _evaluate(self, step: int) -> None:
        """Greedy exact match on the held-out prompts."""
        requests = greedy_requests(
            self.eval_prompts,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            stop_token_id=self.tokenizer.eos_token_id,
        )
        texts = [completion_text(self.tokenizer, s.token_ids) for s in self._generate(requests)]
        hits = [exact(text, prompt.label) for text, prompt in zip(texts, self.eval_prompts, strict=True)]
        self.history.add(step, {"exact_match": float(np.mean(hits))}, phase="eval")

    def _show_sample(self, step: int, prompt_id: int, text: str, reward: float, step_scores: np.ndarray | None) -> None:
        prompt = next(prompt for prompt in self.prompts if prompt.prompt_id == prompt_id)
        scores = None if step_scores is None else step_scores.tolist()
        self.history.add_sample(
            step, prompt=prompt.text, response=text, label=prompt.label, reward=reward, step_scores=scores
        )

    def _measured(self) -> dict[str, Any]:
        measured: dict[str, Any] = {"steps": self.settings.steps}
        for name, phase in _MEASURED:
            values = self.history.curve(name, phase)[1]
            if values:
                measured[f"{name}/first"], measured[f"{name}/last"] = values[0], values[-1]
        for name in ("parity/max", "parity/mean"):
            measured[name] = max(self.history.curve(name)[1])
        return measured


_MEASURED = (
    ("reward", "train"),
    ("reward/rm", "train"),
    ("reward/prm", "train"),
    ("reward/exact", "train"),
    ("exact_match", "eval"),
)


class _Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[f"seconds/{name}"] = now - self._last
        self._last = now


def _rollout_metrics(
    trajectories: Sequence[Trajectory], sources: Sequence[dict[str, float]], rewards: Sequence[float]
) -> dict[str, float]:
    """sources: each trajectory's values by source, as they are weighted."""
    return {
        "reward": float(np.mean(rewards)),
        **{f"reward/{name}": float(np.mean([one[name] for one in sources])) for name in sources[0]},
        "response_tokens": float(np.mean([len(t.response_ids) for t in trajectories])),
        "truncated": float(np.mean([t.finish_reason == "length" for t in trajectories])),
    }


def _step_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """What the process reward model found; nothing without one. A response without a step counts as a verdict of 0."""
    steps = [one.step_scores for one in scored if one.step_scores is not None]
    if not steps:
        return {}
    return {
        "steps": float(np.mean([len(one) for one in steps])),
        "without_steps": float(np.mean([len(one) == 0 for one in steps])),
    }


def _parity(trajectories: Sequence[Trajectory], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Largest and mean difference between the sampler's and the trainer's log-probs of the same tokens and weights.

    A NaN of the sampler's is left out and counted. Raises ValueError when it gave nothing else.
    """
    given = np.concatenate([t.sampler_logprobs[t.action_mask] for t in trajectories])
    nan = np.isnan(given)
    if nan.all():
        raise ValueError(f"the sampler's log-probs of all {len(given)} tokens of the rollout are NaN")
    differences = np.concatenate(
        [np.abs(t.sampler_logprobs - ours)[t.action_mask] for t, ours in zip(trajectories, logprobs, strict=True)]
    )
    known = differences[~nan]
    return {"parity/max": float(known.max()), "parity/mean": float(known.mean()), "parity/nan": float(nan.sum())}
