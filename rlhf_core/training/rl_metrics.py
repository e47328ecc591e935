"""What a rollout says of itself, as metrics of its step. docs/rl.md explains each name."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.training.experience import Judgement
from rlhf_core.training.rewarded import Rewarded

DECILES = tuple(range(0, 101, 10))


@dataclass
class Clock:
    """Seconds of each phase of a step, those of its rounds together."""

    laps: dict[str, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Of each phase, and of the step so far."""
        phases = {f"seconds/{name}": seconds for name, seconds in self.laps.items()}
        return {**phases, "seconds/step": time.monotonic() - self._started}


def rollout_metrics(rollout: Sequence[Rewarded], version: int) -> dict[str, float]:
    """Of the responses that are trained on. Each source's values as they are weighted; a source without a value of
    some response, of those that have one. version: of the weights that the sampler holds in this step."""
    names = sorted({name for one in rollout for name in one.values})
    means = {f"reward/{name}": _mean(one.values[name] for one in rollout if name in one.values) for name in names}
    rewards = np.array([one.graded.reward for one in rollout])
    trajectories = [one.trajectory for one in rollout]
    responses = np.array([len(one.response_ids) for one in trajectories])
    prompts = np.array([len(one.prompt_ids) for one in trajectories])
    return {
        "responses": float(len(rollout)),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **means,
        **{f"reward_percentile/{at}": float(value) for at, value in zip(DECILES, _deciles(rewards), strict=True)},
        "score": _mean(one.score for one in rollout),
        "response_tokens": float(responses.mean()),
        "response_tokens_std": float(responses.std()),
        "total_tokens": float((prompts + responses).mean()),
        "truncated": _mean(one.graded.truncated for one in rollout),
        **staleness(trajectories, version),
    }


def _deciles(rewards: np.ndarray) -> np.ndarray:
    return np.percentile(rewards, DECILES)


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many updates behind `version` the weights were that made the response tokens: mean over tokens, and most."""
    spans = [span for one in trajectories for span in one.version_spans if span.stop > span.start]
    lengths = [span.stop - span.start for span in spans]
    ages = [version - span.version for span in spans]
    return {"staleness": float(np.average(ages, weights=lengths)), "staleness/max": float(max(ages))}


def step_metrics(judged: Sequence[Judgement]) -> dict[str, float]:
    """What the process reward model found; nothing without one. A response without a step counts as a verdict of 0."""
    steps = [one.step_scores for one in judged if one.step_scores is not None]
    if not steps:
        return {}
    return {"steps": _mean(len(one) for one in steps), "without_steps": _mean(len(one) == 0 for one in steps)}


def parity(trajectories: Sequence[Trajectory], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
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


def throughput(name: str, tokens: int, seconds: float, accelerators: int) -> dict[str, float]:
    """Tokens a second, of all accelerators and of each. On the CPU a rank counts as one."""
    rate = tokens / seconds
    return {f"tokens_per_s/{name}": rate, f"tokens_per_s/{name}/accelerator": rate / accelerators}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
