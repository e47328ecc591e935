"""RL's loop: sample, reward, score, train, send the weights. The driver of one trainer group and one sampler."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.batches import SampleOrder
from rlhf_core.rollout.evaluation import sampled_metrics
from rlhf_core.rollout.outcomes import Outcome, Response
from rlhf_core.rollout.prompts import Prompt, completion_text, greedy_requests, rollout_requests
from rlhf_core.rollout.reward_sources import RewardSources, settle
from rlhf_core.rollout.rewards import RewardMix, solution_verdict
from rlhf_core.rollout.sample import Sample
from rlhf_core.rollout.trajectory import Trajectory, single_turn
from rlhf_core.rollout.verifiers import exact
from rlhf_core.rollout.weight_transfer import transfer_directory
from rlhf_core.store.checkpoints import best_complete, newest_complete
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.experience import Graded, Judgement
from rlhf_core.training.progress import finish_checkpoint, restore, resume_point
from rlhf_core.training.rank import Job
from rlhf_core.training.rl_batches import Share, rollout_layout, shares

RL_TRAINER = "rlhf_core.training.rl:RlTrainer"


@dataclass(frozen=True)
class Rewarded:
    """A sampled response and all that is known of it before training.

    values: of each source, as it is weighted. reward: their weighted sum. score: the same of what sources call their
    scores, by which groups are filtered.
    """

    trajectory: Trajectory
    prompt: Prompt
    text: str
    graded: Graded
    values: dict[str, float]
    score: float


@dataclass(frozen=True)
class Round:
    """What the sampler was asked for once. groups: those of which every response could be scored. outcomes, group_ids,
    judged: of all responses."""

    groups: list[list[Rewarded]]
    outcomes: list[dict[str, Outcome]]
    group_ids: list[int]
    judged: list[Judgement]


@dataclass
class PpoRun:
    """One run in exact mode: a step is a function of the weights before it, the seed, its number and the prompts drawn.

    What moves whole checkpoints (restoring, saving) may take start_timeout_s; a step's parts, step_timeout_s each.
    """

    job: Job
    trainers: WorkerGroup
    sampler: WorkerGroup
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    mix: RewardMix
    sources: RewardSources
    history: History
    store: Store
    lease: Lease
    start_timeout_s: float
    _drawn: int = field(default=0, init=False)  # prompts so far: the position in their order

    @cached_property
    def _order(self) -> SampleOrder:
        return SampleOrder(len(self.prompts), self.settings.seed)

    @property
    def settings(self) -> PpoSettings:
        return self.job.settings

    def run(self) -> dict[str, Any]:
        """All steps, from the newest complete training checkpoint. Returns what was measured first and last.

        With `best_metric` the ranks end with the weights of the best evaluation.
        """
        settings, events = self.settings, self.history.events
        start = self._resume()
        self._send_weights(start)
        if start == 0:
            self._evaluate(0)
        events.phase("training")
        for step in range(start + 1, settings.steps + 1):
            self.history.add(step, self._step(step))
            metric = None
            if step == settings.steps or (settings.eval_steps and step % settings.eval_steps == 0):
                metric = self._evaluate(step)
            events.progress(step, settings.steps, "training")
            if settings.trainer.saves_at(step, settings.steps) or self._improved(step):
                self._checkpoint(step, metric)
        return {**self._measured(), "exported_step": self._restore_best()}

    # -- training checkpoints --------------------------------------------------------------------------------------

    def _resume(self) -> int:
        start = resume_point(self.trainers, self.job, self.store, self.history, timeout_s=self.start_timeout_s)
        if start:
            checkpoint, _ = newest_complete(self.store, self.job.stage, self.job.key)
            assert checkpoint is not None  # only the lease's holder removes one
            self._drawn = checkpoint.extra["prompts_drawn"]
        return start

    def _checkpoint(self, step: int, metric: float | None) -> None:
        finish_checkpoint(
            self.trainers,
            self.job,
            self.store,
            self.lease,
            self.history,
            step,
            self.settings.trainer,
            timeout_s=self.start_timeout_s,
            extra={"prompts_drawn": self._drawn},
            metric=metric,
            better="higher",
        )

    def _improved(self, step: int) -> bool:
        """Whether the evaluation at `step`, if there was one, is better than each before it but the first, of step 0:
        the weights that training started from are no result of this stage."""
        if self.settings.best_metric is None:
            return False
        steps, values = self.history.curve(self.settings.best_metric, "eval")
        trained = [value for at, value in zip(steps, values, strict=True) if at]
        return bool(trained) and steps[-1] == step and all(trained[-1] > before for before in trained[:-1])

    def _restore_best(self) -> int:
        """The step whose weights the ranks now hold: that of the best evaluation, or the last."""
        last = self.settings.steps
        if self.settings.best_metric is None:
            return last
        best = best_complete(self.store, self.job.stage, self.job.key, "higher")
        if best is None or best.step == last:
            return last
        self.history.events.write("phase", name="best", step=best.step)
        restore(self.trainers, self.job, self.store, best, timeout_s=self.start_timeout_s)
        return best.step

    # -- a step ----------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        """One rollout and the passes over it; leaves the sampler with the new weights."""
        clock = _Clock()
        rollout, about = self._rollout(step, clock)
        trajectories = [one.trajectory for one in rollout]
        dealt = self._dealt(trajectories)
        scoring = self._start("score", trajectories, dealt)
        scored = self._gathered("score", scoring, dealt)
        clock.lap("score")
        # The references go to the ranks, not the arrays: Ray hands those over through shared memory.
        graded = [one.graded for one in rollout]
        numbers = [share.numbers for share in dealt]
        trained = self._call("train", step, graded, numbers, *scoring)[0]
        clock.lap("train")
        self._send_weights(step)
        clock.lap("transfer")
        self._show_sample(step, rollout[0])
        return {
            **_rollout_metrics(rollout),
            **about,
            **_parity(trajectories, [one.logprobs for one in scored]),
            **trained,
            **clock.laps,
        }

    def _rollout(self, step: int, clock: "_Clock") -> tuple[list[Rewarded], dict[str, float]]:
        """The step's responses, group by group, and metrics of how they came about.

        With dynamic sampling groups without spread are replaced by those of further prompts while rounds are left; then
        they fill up what is missing, in the order in which they were drawn.
        """
        rollout, dynamic = self.settings.rollout, self.settings.algorithm.dynamic_sampling
        kept: list[list[Rewarded]] = []
        flat: list[list[Rewarded]] = []
        rounds: list[Round] = []
        asked = 0
        while len(kept) < rollout.prompts and len(rounds) < (dynamic.max_rounds if dynamic.enabled else 1):
            missing = rollout.prompts - len(kept)
            rounds.append(self._round(step, missing, asked, clock))
            asked += missing
            for group in rounds[-1].groups:
                (kept if not dynamic.enabled or _spread(group) > dynamic.min_spread else flat).append(group)
        filled = flat[: rollout.prompts - len(kept)]
        if not kept and not filled:
            raise ValueError(f"step {step}: no response of the rollout's {asked} groups could be scored")
        metrics = _source_metrics(rounds, self.settings.reward)
        if dynamic.enabled:
            metrics |= {
                "dynamic_sampling/rounds": len(rounds),
                "dynamic_sampling/groups": asked,
                "dynamic_sampling/without_spread": len(flat) / asked,
                "dynamic_sampling/filled": len(filled),
            }
        return [one for group in [*kept, *filled] for one in group], metrics

    def _round(self, step: int, count: int, first_group: int, clock: "_Clock") -> Round:
        """The responses to the next `count` prompts, and what the sources say of them."""
        trajectories, prompts = self._sampled(step, count, first_group)
        texts = [completion_text(self.tokenizer, t.response_ids.tolist()) for t in trajectories]
        clock.lap("rollout")
        waiting = self.sources.start([self._response(*one) for one in zip(trajectories, prompts, texts, strict=True)])
        judged = self._judged(trajectories)
        outcomes, group_ids = waiting(), [t.group_id for t in trajectories]
        settled = settle(outcomes, group_ids, self.settings.reward)
        clock.lap("reward")
        groups: dict[int, list[Rewarded]] = {}
        for number, (t, prompt, text, judgement) in enumerate(zip(trajectories, prompts, texts, judged, strict=True)):
            if not settled.kept[number]:
                continue
            models = self._model_values(judgement)
            values, scores = ({**models, **one[number]} for one in (settled.values, settled.scores))
            graded = Graded(
                reward=self.mix.total(values),
                group=t.group_id,
                truncated=t.finish_reason == "length",
                step_scores=() if judgement.step_scores is None else tuple(judgement.step_scores.tolist()),
                step_ends=judgement.step_ends,
            )
            one = Rewarded(t, prompt, text, graded, self.mix.values(values), self.mix.total(scores))
            groups.setdefault(t.group_id, []).append(one)
        return Round(list(groups.values()), outcomes, group_ids, judged)

    def _sampled(self, step: int, count: int, first_group: int) -> tuple[list[Trajectory], list[Prompt]]:
        """Trajectories of the next `count` prompts, and the prompt of each."""
        rollout = self.settings.rollout
        chosen = [self.prompts[i] for i in self._order.ids(self._drawn, count)]
        self._drawn += count
        requests = rollout_requests(
            chosen,
            samples_per_prompt=rollout.samples_per_prompt,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            seed=self.settings.seed,
            step=step,
            stop_token_ids=self.stop_token_ids,
            first_group=first_group,
        )
        prompts = [prompt for prompt in chosen for _ in range(rollout.samples_per_prompt)]
        trajectories = [
            single_turn(
                request, sample, group_id=request.sample_id // rollout.samples_per_prompt, prompt_id=prompt.prompt_id
            )
            for request, sample, prompt in zip(requests, self._generate(requests), prompts, strict=True)
        ]
        return trajectories, prompts

    def _response(self, trajectory: Trajectory, prompt: Prompt, text: str) -> Response:
        ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
        return Response(
            query=self.tokenizer.decode(ids, skip_special_tokens=False),
            prompt=prompt.text,
            completion=text,
            label=prompt.label,
        )

    def _judged(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """What the models of rewards say of each."""
        if not {"reward", "process"} & self.job.manifests.keys():
            return [Judgement()] * len(trajectories)
        dealt = self._dealt(trajectories)
        return self._gathered("judge", self._start("judge", trajectories, dealt), dealt)

    def _model_values(self, judgement: Judgement) -> dict[str, float]:
        """What the models of rewards gave: those that this run has."""
        values: dict[str, float] = {}
        if "reward" in self.job.manifests:
            values["rm"] = judgement.reward_score
        if judgement.step_scores is not None:
            values["prm"] = solution_verdict(judgement.step_scores.tolist(), self.settings.reward.prm_aggregate)
        return values

    # -- calls of the groups ---------------------------------------------------------------------------------------

    def _dealt(self, trajectories: Sequence[Trajectory]) -> list[Share]:
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
        return shares(lengths, rollout_layout(self.settings))

    def _start(self, method: str, trajectories: Sequence[Trajectory], dealt: Sequence[Share]) -> list[Any]:
        """References to what each rank finds of its trajectories."""
        own = [([trajectories[i] for i in share.numbers], share.micro_batches) for share in dealt]
        return self.trainers.start(method, per_rank=own)

    def _gathered(self, method: str, references: list[Any], dealt: Sequence[Share]) -> list[Any]:
        """What the ranks found, in the order of the trajectories."""
        limit = self.settings.trainer.step_timeout_s
        found = self.trainers.wait(references, method, timeout_s=limit)
        by_number = {
            number: one
            for share, own in zip(dealt, found, strict=True)
            for number, one in zip(share.numbers, own, strict=False)
        }
        return [by_number[number] for number in range(len(by_number))]

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.trainers.call(method, *args, timeout_s=self.settings.trainer.step_timeout_s)

    def _generate(self, requests: list[Any]) -> list[Sample]:
        return self.sampler.call("generate", requests, timeout_s=self.settings.generate_timeout_s)[0]

    def _send_weights(self, version: int, averaged: bool = False) -> None:
        """The policy's weights, or their moving average, into the sampler."""
        limit = self.settings.trainer.step_timeout_s
        with transfer_directory(self.job.scratch) as directory:
            index = self._call("write_weights", str(directory), version, averaged)[0]
            self.sampler.call("update_weights", index, timeout_s=limit)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> float | None:
        """Exact match on the held-out prompts: greedy, and of several samples where that is set. Returns `best_metric`.

        Sampled from what is exported: the moving average where there is one.
        """
        if self.settings.ema_decay is not None:
            self._send_weights(step, averaged=True)
        settings = self.settings.evaluation
        limits = {
            "max_new_tokens": self.settings.rollout.max_new_tokens,
            "stop_token_ids": self.stop_token_ids,
        }
        (greedy,) = zip(*self._hits(greedy_requests(self.eval_prompts, **limits), 1), strict=True)
        metrics = {"exact_match": float(np.mean([hit for hit, _ in greedy]))}
        if settings.samples_per_prompt:
            # Step 0 has no rollout: its seeds are the evaluations' own, the same each time.
            requests = rollout_requests(
                self.eval_prompts,
                samples_per_prompt=settings.samples_per_prompt,
                temperature=settings.temperature,
                seed=self.settings.seed,
                step=0,
                **limits,
            )
            metrics |= sampled_metrics(self._hits(requests, settings.samples_per_prompt), settings.ks)
        self.history.add(step, metrics, phase="eval")
        if self.settings.ema_decay is not None:
            self._send_weights(step)
        return metrics[self.settings.best_metric] if self.settings.best_metric is not None else None

    def _hits(self, requests: list[Any], each: int) -> list[list[tuple[float, str]]]:
        """For each held-out prompt its `each` responses: whether it is right, and the text."""
        texts = [completion_text(self.tokenizer, s.token_ids) for s in self._generate(requests)]
        return [
            [(exact(text, prompt.label), text) for text in texts[at * each : (at + 1) * each]]
            for at, prompt in enumerate(self.eval_prompts)
        ]

    # -- what is shown ---------------------------------------------------------------------------------------------

    def _show_sample(self, step: int, shown: Rewarded) -> None:
        scores = list(shown.graded.step_scores) if "prm" in shown.values else None
        self.history.add_sample(
            step,
            prompt=shown.prompt.text,
            response=shown.text,
            label=shown.prompt.label,
            reward=shown.graded.reward,
            step_scores=scores,
        )

    def _measured(self) -> dict[str, Any]:
        measured: dict[str, Any] = {"steps": self.settings.steps}
        names = [(f"reward/{name}", "train") for name in self.settings.reward.weights]
        for name, phase in [("reward", "train"), *names, *((n, "eval") for n in self.settings.evaluation.metrics)]:
            values = self.history.curve(name, phase)[1]
            if values:
                measured[f"{name}/first"], measured[f"{name}/last"] = values[0], values[-1]
        for name in ("parity/max", "parity/mean"):
            measured[name] = max(self.history.curve(name)[1])
        return measured


class _Clock:
    """Seconds of each part of a step, those of its rounds together."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[f"seconds/{name}"] = self.laps.get(f"seconds/{name}", 0.0) + now - self._last
        self._last = now


def _spread(group: Sequence[Rewarded]) -> float:
    scores = [one.score for one in group]
    return max(scores) - min(scores)


def _rollout_metrics(rollout: Sequence[Rewarded]) -> dict[str, float]:
    """Each source's values as they are weighted; a source without a value of some response, of those that have one."""
    names = {name for one in rollout for name in one.values}
    means = {
        f"reward/{name}": float(np.mean([one.values[name] for one in rollout if name in one.values])) for name in names
    }
    return {
        "reward": float(np.mean([one.graded.reward for one in rollout])),
        **dict(sorted(means.items())),
        "response_tokens": float(np.mean([len(one.trajectory.response_ids) for one in rollout])),
        "truncated": float(np.mean([one.graded.truncated for one in rollout])),
    }


def _source_metrics(rounds: Sequence[Round], settings: RewardSettings) -> dict[str, float]:
    """What the sources and the process reward model say of all responses of a step, those left out too."""
    outcomes = [one for part in rounds for one in part.outcomes]
    group_ids = [one for part in rounds for one in part.group_ids]
    judged = [one for part in rounds for one in part.judged]
    return {**settle(outcomes, group_ids, settings).metrics, **_step_metrics(judged)}


def _step_metrics(judged: Sequence[Judgement]) -> dict[str, float]:
    """What the process reward model found; nothing without one. A response without a step counts as a verdict of 0."""
    steps = [one.step_scores for one in judged if one.step_scores is not None]
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
