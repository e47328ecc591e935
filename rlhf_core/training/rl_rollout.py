"""A step's rollout: prompts are drawn, the sampler responds, sources reward, groups without spread are replaced."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlhf_core.cluster.limit import Limit
from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.batches import SampleOrder
from rlhf_core.rollout.generation import generate
from rlhf_core.rollout.outcomes import Failed, Outcome
from rlhf_core.rollout.prompts import Prompt, completion_text, rollout_requests, sampled_response
from rlhf_core.rollout.reward_sources import RewardSources, settle
from rlhf_core.rollout.rewards import RewardMix, solution_verdict
from rlhf_core.rollout.trajectory import Trajectory, single_turn
from rlhf_core.training.experience import Judgement
from rlhf_core.training.rewarded import Rewarded, rewarded
from rlhf_core.training.rl_metrics import Clock, step_metrics, throughput
from rlhf_core.training.rl_ranks import RlRanks


@dataclass(frozen=True)
class Round:
    """What the sampler was asked for once. groups: those of which every response could be scored. outcomes, group_ids,
    judged: of all responses; tokens: of all responses together."""

    groups: list[list[Rewarded]]
    outcomes: list[dict[str, Outcome]]
    group_ids: list[int]
    judged: list[Judgement]
    tokens: int


@dataclass
class Rollouts:
    """Where the trajectories of a step come from. models: of "reward" and "process" those that the ranks hold.

    drawn: prompts so far, the position in their order. A rollout is a function of it, the sampler's weights, the seed
    and the step's number.
    """

    settings: PpoSettings
    ranks: RlRanks
    models: frozenset[str]
    sampler: WorkerGroup
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    prompts: Sequence[Prompt]
    mix: RewardMix
    sources: RewardSources
    drawn: int = field(default=0, init=False)

    @cached_property
    def _order(self) -> SampleOrder:
        return SampleOrder(len(self.prompts), self.settings.seed)

    def draw(self, step: int, clock: Clock) -> tuple[list[Rewarded], dict[str, float]]:
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
            raise ValueError(
                f"step {step}: no response of the rollout's {asked} groups could be scored; "
                f"{_first_failure(rounds, self.settings.reward)}"
            )
        metrics = _source_metrics(rounds, self.settings.reward)
        if dynamic.enabled:
            metrics |= {
                "dynamic_sampling/rounds": len(rounds),
                "dynamic_sampling/groups": asked,
                "dynamic_sampling/pass_rate": len(kept) / asked,
                "dynamic_sampling/without_spread": len(flat) / asked,
                "dynamic_sampling/filled": len(filled),
            }
        return [one for group in [*kept, *filled] for one in group], metrics | self._speed(rounds, clock)

    def _speed(self, rounds: Sequence[Round], clock: Clock) -> dict[str, float]:
        tokens = sum(one.tokens for one in rounds)
        return throughput("rollout", tokens, clock.laps["rollout"], self.settings.sampler.tensor_parallel_size)

    def _round(self, step: int, count: int, first_group: int, clock: Clock) -> Round:
        """The responses to the next `count` prompts, and what the sources say of them."""
        trajectories, prompts = self._sampled(step, count, first_group)
        texts = [completion_text(self.tokenizer, t.response_ids.tolist()) for t in trajectories]
        clock.lap("rollout")
        waiting = self.sources.start(
            [
                sampled_response(self.tokenizer, prompt, t.response_ids.tolist(), text)
                for t, prompt, text in zip(trajectories, prompts, texts, strict=True)
            ]
        )
        judged = self.ranks.judge(trajectories) if self.models else [Judgement()] * len(trajectories)
        outcomes, group_ids = waiting(), [t.group_id for t in trajectories]
        settled = settle(outcomes, group_ids, self.settings.reward)
        clock.lap("reward")
        groups: dict[int, list[Rewarded]] = {}
        for number, (t, prompt, text, judgement) in enumerate(zip(trajectories, prompts, texts, judged, strict=True)):
            if not settled.kept[number]:
                continue
            models = self._model_values(judgement)
            known = replace(
                t,
                rewards={**models, **settled.values[number]},
                scores={**models, **settled.scores[number]},
                step_scores=() if judgement.step_scores is None else tuple(judgement.step_scores.tolist()),
                step_ends=judgement.step_ends,
            )
            groups.setdefault(t.group_id, []).append(rewarded(known, self.mix, prompt, text))
        tokens = sum(len(t.response_ids) for t in trajectories)
        return Round(list(groups.values()), outcomes, group_ids, judged, tokens)

    def _sampled(self, step: int, count: int, first_group: int) -> tuple[list[Trajectory], list[Prompt]]:
        """Trajectories of the next `count` prompts, and the prompt of each."""
        rollout = self.settings.rollout
        chosen = [self.prompts[i] for i in self._order.ids(self.drawn, count)]
        self.drawn += count
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
        limit = Limit(self.settings.generate_timeout_s, "ppo.generate_timeout_s")
        samples = generate(self.sampler, requests, self.settings.sampler, limit)
        trajectories = [
            single_turn(
                request, sample, group_id=request.sample_id // rollout.samples_per_prompt, prompt_id=prompt.prompt_id
            )
            for request, sample, prompt in zip(requests, samples, prompts, strict=True)
        ]
        return trajectories, prompts

    def _model_values(self, judgement: Judgement) -> dict[str, float]:
        """What the models of rewards gave: those that this run has."""
        values: dict[str, float] = {}
        if "reward" in self.models:
            values["rm"] = judgement.reward_score
        if judgement.step_scores is not None:
            values["prm"] = solution_verdict(judgement.step_scores.tolist(), self.settings.reward.prm_aggregate)
        return values


def _spread(group: Sequence[Rewarded]) -> float:
    scores = [one.score for one in group]
    return max(scores) - min(scores)


def _first_failure(rounds: Sequence[Round], settings: RewardSettings) -> str:
    """Of a source that has a weight: one without drops nothing."""
    failures = (
        f"the first failure, of source {name}: {one.reason}: {one.message}"
        for part in rounds
        for by_source in part.outcomes
        for name, one in by_source.items()
        if isinstance(one, Failed) and settings.weights[name]
    )
    return next(failures)


def _source_metrics(rounds: Sequence[Round], settings: RewardSettings) -> dict[str, float]:
    """What the sources and the process reward model say of all responses of a step, those left out too."""
    outcomes = [one for part in rounds for one in part.outcomes]
    group_ids = [one for part in rounds for one in part.group_ids]
    judged = [one for part in rounds for one in part.judged]
    return {**settle(outcomes, group_ids, settings).metrics, **step_metrics(judged)}
