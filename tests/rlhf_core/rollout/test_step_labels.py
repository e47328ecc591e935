"""Monte-Carlo step labels: where solutions are cut, what is completed, and what the completions say."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_core.config.sampling import StepForm
from rlhf_core.models.scratch import build_tokenizer
from rlhf_core.rollout.sample import SampleRequest
from rlhf_core.rollout.step_labels import (
    StepPlan,
    completion_requests,
    label_steps,
    monte_carlo_label,
    plan_steps,
    solution_of,
)

TOKENIZER = build_tokenizer(64)


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER(text)["input_ids"], np.int32)


def request(number: int, prompt: str = "1+2+3=", room: int = 24) -> SampleRequest:
    return SampleRequest(number, tuple(ids(prompt).tolist()), room, 0.7, 0.9, 100 + number, (2,))


def planned(*responses: tuple[str, bool], prompts: list[str] | None = None, room: int = 24) -> StepPlan:
    """Of (response, whether it was cut off) to one prompt, or to those given."""
    requests = [request(n, (prompts or ["1+2+3="] * len(responses))[n], room) for n in range(len(responses))]
    return plan_steps(TOKENIZER, requests, [ids(text) for text, _ in responses], [cut for _, cut in responses], ",")


# -- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "truncated", "steps", "beginnings"),
    [
        ("1+2=3,3+3=6#6<|end|>", False, ["1+2=3", "3+3=6#6"], ["1+2=3,"]),
        ("6#6<|end|>", False, ["6#6"], []),
        ("<|end|>", False, [], []),
        ("1,2,3<|end|>", False, ["1", "2", "3"], ["1,", "1,2,"]),
        ("1,,2<|end|>", False, ["1", "2"], ["1,"]),
        ("1,2,<|end|>", False, ["1", "2"], ["1,"]),
        ("1+2=3,3+", True, ["1+2=3"], ["1+2=3,"]),
        ("1+2=3,", True, ["1+2=3"], ["1+2=3,"]),
        ("1+2", True, [], []),
        ("1+2=3, ", True, ["1+2=3"], ["1+2=3,"]),
    ],
)
def test_a_solution_is_cut_behind_each_separator(
    response: str, truncated: bool, steps: list[str], beginnings: list[str]
) -> None:
    found = solution_of(TOKENIZER, ids(response), ",", truncated=truncated)
    assert found.steps == steps
    assert [TOKENIZER.decode(ids(response)[:end]) for end in found.ends] == beginnings


def merging_tokenizer() -> Any:
    """With tokens of several characters: `.;` ends a step with its separator, `;b` begins the next one with it."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "a", "b", ".", ";", ".;", ";b", "<end>"])}
    inner = Tokenizer(models.BPE(vocabulary, [(".", ";"), (";", "b")], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")


@pytest.mark.parametrize(
    ("response", "tokens", "cut_behind"),
    [("a.;b", ["a", ".;", "b"], "a.;"), ("a;b", ["a", ";b"], "a"), ("a;a", ["a", ";", "a"], "a;")],
)
def test_a_token_of_the_next_step_is_no_part_of_a_beginning(response: str, tokens: list[str], cut_behind: str) -> None:
    tokenizer = merging_tokenizer()
    encoded = np.array(tokenizer(response)["input_ids"])
    assert tokenizer.convert_ids_to_tokens(encoded.tolist()) == tokens
    found = solution_of(tokenizer, encoded, ";", truncated=False)
    assert [tokenizer.decode(encoded[:end].tolist()) for end in found.ends] == [cut_behind]


# -- what is completed --------------------------------------------------------------------------------------------


def test_equal_solutions_and_beginnings_are_taken_once_a_prompt() -> None:
    same = ("1+2=3,3+3=6#6<|end|>", False)
    plan = planned(same, same, ("1+2=3,3+3=7#7<|end|>", False), ("<|end|>", False), same, prompts=["1="] * 4 + ["2="])
    assert plan.numbers == [0, 2, 4]
    assert [(one.of, TOKENIZER.decode(one.ids)) for one in plan.beginnings] == [(0, "1+2=3,"), (4, "1+2=3,")]
    assert plan.completed == [[0, None], [0, None], [1, None]]


def test_nothing_is_completed_where_nothing_fits() -> None:
    plan = planned(("1,2,", True), room=4)
    assert plan.completed == [[0, None]]
    assert [TOKENIZER.decode(one.ids) for one in plan.beginnings] == ["1,"]


def test_completions_go_on_where_the_beginning_ends() -> None:
    plan = planned(("1+2=3,3+3=6#6<|end|>", False), ("9,9<|end|>", False))
    requests = [request(0), request(1)]
    made = completion_requests(requests, plan.beginnings, 2, seed=5)
    assert [one.sample_id for one in made] == [0, 1, 2, 3]
    assert [TOKENIZER.decode(list(one.prompt_ids)) for one in made] == ["1+2+3=1+2=3,"] * 2 + ["1+2+3=9,"] * 2
    assert [one.max_new_tokens for one in made] == [18, 18, 22, 22]
    assert {(one.temperature, one.top_p, one.stop_token_ids) for one in made} == {(0.7, 0.9, (2,))}
    assert len({one.seed for one in [*made, *requests]}) == 6
    assert made == completion_requests(requests, plan.beginnings, 2, seed=5)
    assert made[0].seed != completion_requests(requests, plan.beginnings, 2, seed=6)[0].seed


# -- labels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "hard", "soft"),
    [
        ([0, 0, 1, 0], True, 0.25),
        ([0, 0, 0, 0], False, 0.0),
        ([1, 1], True, 1.0),
        ([], None, None),
        ([1, None], None, None),
    ],
)
def test_hard_is_any_and_soft_is_the_share(rewards: list[float | None], hard: bool | None, soft: float | None) -> None:
    assert monte_carlo_label(rewards, StepForm(labels="hard")) is hard
    assert monte_carlo_label(rewards, StepForm(labels="soft")) == soft


def test_what_is_right_is_a_threshold() -> None:
    form = StepForm(labels="soft", right_at=0.5)
    assert monte_carlo_label([0.4, 0.5, 0.9], form) == 2 / 3
    whole = 0.6 + 0.3 + 0.1
    assert whole < 1
    assert monte_carlo_label([whole], StepForm(labels="hard")) is True


def test_labels_of_whole_solutions() -> None:
    """Two completions of each beginning: 1, | 1,2, | 9,"""
    plan = planned(("1,2,3<|end|>", False), ("9,9<|end|>", False), ("8,8", True))
    assert [TOKENIZER.decode(one.ids) for one in plan.beginnings] == ["1,", "1,2,", "9,", "8,"]
    form = StepForm(completions=2, labels="soft")
    labelled = label_steps(plan, [1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, None, None, 0.0], form)
    assert labelled.rows == [
        (0, {"steps": ["1", "2", "3"], "labels": [0.5, 0.0, 1.0]}),
        (1, {"steps": ["9", "9"], "labels": [None, 0.0]}),
    ]
    assert labelled.counts == {"solutions_without_labels": 1, "steps": 6, "steps_unlabelled": 2}
    hard = label_steps(plan, [1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], StepForm(completions=2))
    assert [row["labels"] for _, row in hard.rows] == [[True, False, True], [True, False], [False]]


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_hard_says_whether_soft_is_above_zero(right: list[bool]) -> None:
    rewards = [float(one) for one in right]
    soft = monte_carlo_label(rewards, StepForm(labels="soft"))
    assert soft is not None
    assert monte_carlo_label(rewards, StepForm(labels="hard")) == (soft > 0)
    assert soft * len(right) == pytest.approx(sum(right))
