"""Step labels by Monte-Carlo completion (Wang et al. 2024, Math-Shepherd, section 3.3).

A solution that was sampled is cut after each of its steps, and each beginning is completed several times: a step is as
good as the answers that can still be reached from it. The last step of a finished solution needs no completion, its
answer is there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf_core.config.sampling import StepForm
from rlhf_core.data.placeholders import split_steps, step_ends
from rlhf_core.data.rows import Row
from rlhf_core.rollout.sample import SampleRequest, sample_seed
from rlhf_core.rollout.sample_rows import reaches
from rlhf_core.rollout.step_scores import answer_ids


@dataclass(frozen=True)
class Solution:
    """steps: as text, without separators. ends: of the beginnings to complete, one for each step, or for each but the
    last where that is the end of a finished solution: how many of the response's ids it has."""

    steps: list[str]
    ends: list[int]


def solution_of(tokenizer: Any, response_ids: np.ndarray, separator: str, *, truncated: bool) -> Solution:
    """The steps of a sampled response. The unfinished last step of one that was cut off is left out.

    A beginning has the separator behind its step, unless a token holds more than that.
    """
    ids = answer_ids(response_ids, tokenizer).tolist()
    text = _text(tokenizer, ids)
    steps = split_steps(text, separator)
    if truncated and text.rpartition(separator)[2].strip():  # a blank tail is no step
        steps.pop()
    to_complete = steps if truncated else steps[:-1]
    plain = step_ends(tokenizer, ids, to_complete)
    separated = step_ends(tokenizer, ids, [step + separator for step in to_complete])
    ends = [
        behind if _text(tokenizer, ids[:behind]).endswith(separator) else end
        for end, behind in zip(plain, separated, strict=True)
    ]
    return Solution(steps, ends)


@dataclass(frozen=True)
class Beginning:
    """of: the number of the request whose response begins with these ids (B,)."""

    of: int
    ids: np.ndarray


@dataclass(frozen=True)
class StepPlan:
    """What has to be completed. numbers: of the responses that are labelled, each different one of a prompt that has a
    step; solutions: theirs. completed: for each step of each the number of its beginning, None where there is none:
    for the end of a finished solution, and where nothing fits behind the step.
    """

    numbers: list[int]
    solutions: list[Solution]
    beginnings: list[Beginning]
    completed: list[list[int | None]]


def plan_steps(
    tokenizer: Any,
    requests: Sequence[SampleRequest],
    responses: Sequence[np.ndarray],
    truncated: Sequence[bool],
    separator: str,
) -> StepPlan:
    """Equal beginnings of a prompt are completed once, for all solutions that share them."""
    plan = StepPlan([], [], [], [])
    seen: set[tuple[Any, bytes]] = set()
    known: dict[tuple[Any, bytes], int] = {}
    for number, (request, ids, cut) in enumerate(zip(requests, responses, truncated, strict=True)):
        solution = solution_of(tokenizer, ids, separator, truncated=cut)
        whole = (request.prompt_ids, ids.tobytes())
        if whole in seen or not solution.steps:
            continue
        seen.add(whole)
        completed: list[int | None] = [None] * len(solution.steps)
        for step, end in enumerate(solution.ends):
            place = (request.prompt_ids, ids[:end].tobytes())
            if end < request.max_new_tokens and place not in known:
                known[place] = len(plan.beginnings)
                plan.beginnings.append(Beginning(number, ids[:end]))
            completed[step] = known.get(place)
        plan.numbers.append(number)
        plan.solutions.append(solution)
        plan.completed.append(completed)
    return plan


def completion_requests(
    requests: Sequence[SampleRequest], beginnings: Sequence[Beginning], completions: int, seed: int
) -> list[SampleRequest]:
    """`completions` requests for each beginning, in order. With its beginning a completion is no longer than a whole
    response may be. requests: those that drew the responses."""
    return [
        replace(
            requests[one.of],
            sample_id=number * completions + k,
            prompt_ids=(*requests[one.of].prompt_ids, *one.ids.tolist()),
            max_new_tokens=requests[one.of].max_new_tokens - len(one.ids),
            # Step 1: the solutions' own seeds are those of step 0.
            seed=sample_seed(seed, 1, number, k),
        )
        for number, one in enumerate(beginnings)
        for k in range(completions)
    ]


@dataclass(frozen=True)
class LabelledSteps:
    """rows: (number of the response, its steps and labels), of the responses that have a label. counts: of all."""

    rows: list[tuple[int, Row]]
    counts: Counter[str]


def label_steps(
    plan: StepPlan, rewards: Sequence[float | None], completion_rewards: Sequence[float | None], form: StepForm
) -> LabelledSteps:
    """rewards: of every response; completion_rewards: as `completion_requests` asks for them. None: no reward."""
    rows: list[tuple[int, Row]] = []
    counts: Counter[str] = Counter({"solutions_without_labels": 0, "steps": 0, "steps_unlabelled": 0})
    each = form.completions
    for number, solution, completed in zip(plan.numbers, plan.solutions, plan.completed, strict=True):
        by_step = [[] if at is None else completion_rewards[at * each : (at + 1) * each] for at in completed]
        if len(solution.ends) < len(solution.steps):
            by_step[-1] = [rewards[number]]
        labels = [monte_carlo_label(one, form) for one in by_step]
        counts["steps"] += len(labels)
        counts["steps_unlabelled"] += labels.count(None)
        if any(label is not None for label in labels):
            rows.append((number, {"steps": solution.steps, "labels": labels}))
        else:
            counts["solutions_without_labels"] += 1
    return LabelledSteps(rows, counts)


def monte_carlo_label(rewards: Sequence[float | None], form: StepForm) -> bool | float | None:
    """A step's label from the rewards of its completions: hard, whether any is right; soft, the share that is.

    None, no label, where there are no completions or one of them has no reward.
    """
    if not rewards or any(reward is None for reward in rewards):
        return None
    right = [reward is not None and reaches(reward, form.right_at) for reward in rewards]
    return any(right) if form.labels == "hard" else sum(right) / len(right)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
