import json
import threading

import pytest

from rlhf_core.rollout import verifiers
from rlhf_core.rollout.outcomes import Failed, Scored
from rlhf_core.rollout.verifiers import exact


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("3+4=7#7", "7", 1.0),
        ("3+4=7# 7 ", "7", 1.0),
        ("so he has 1,250 left.\n#### 1,250", "1250", 1.0),
        ("so 72.\n#### 72", "A worked solution.\n#### 72", 1.0),
        ("3+4=7#8", "7", 0.0),
        ("3+4=7", "7", 0.0),
        ("7", "7", 0.0),
        ("3+4=7#7#7", "7", 0.0),
        ("#17", "7", 0.0),
        ("#7.0", "7", 0.0),
        ("#07", "7", 0.0),
        ("", "7", 0.0),
        ("#", "7", 0.0),
    ],
)
def test_one_marked_answer_that_equals_the_label(completion, label, score):
    assert exact(completion, label) == score


def test_gsm8k_solutions_verify_against_themselves_and_not_against_each_other(test_data):
    lines = (test_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:300]
    answers = [json.loads(line)["answer"] for line in lines]
    assert all(exact(answer, answer) == 1.0 for answer in answers)
    finals = [answer.split("####")[1].strip().replace(",", "") for answer in answers]
    for answer, final, other in zip(answers[:-1], finals[:-1], finals[1:], strict=True):
        assert exact(answer, other) == float(final == other)


MATH = [
    (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"$x = \sqrt{8}$", r"2\sqrt{2}", 1.0),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", 1.0),
    ("2 + 5 = 7, and so\n#### 1,250", "She has 5 * 250 = 1250.\n#### 1250", 1.0),
    (r"\boxed{0.333}", r"\frac{1}{3}", 0.0),
    (r"\boxed{(1,2)}", "(1,2)", 1.0),
    ("12 apples.\n#### 13", "12", 0.0),
]


@pytest.mark.parametrize(("completion", "label", "value"), MATH)
def test_answers_are_compared_as_mathematics(completion, label, value):
    assert verifiers.math(completion, label) == Scored(value, extra={"unparsable": 0.0})


def test_no_answer_is_wrong_and_no_label_is_a_failure():
    assert verifiers.math("I cannot say.", "7") == Scored(0.0, extra={"unparsable": 1.0})
    failed = verifiers.math("7", "  ")
    assert isinstance(failed, Failed)
    assert failed.reason == "unparsable"


def test_mathematics_is_the_same_in_a_thread():
    """math-verify's own limits are signals, which a thread cannot set."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(verifiers.math(*case[:2]) for case in MATH))
    thread.start()
    thread.join()
    assert [one.value for one in found] == [value for *_, value in MATH]


@pytest.mark.parametrize(
    ("completion", "label", "compare", "value"),
    [
        ("<answer>7</answer>", "8", False, 1.0),
        ("<answer>7</answer> no, <answer> 8 </answer>", "8", True, 1.0),
        ("<answer>8</answer> no, <answer>7</answer>", "8", True, 0.0),
        ("8", "8", True, 0.0),
        ("8", "8", False, 0.0),
    ],
)
def test_a_pattern_is_found_or_its_group_is_the_label(completion, label, compare, value):
    assert verifiers.regex(completion, label, pattern=r"<answer>(.*?)</answer>", compare=compare) == Scored(value)


@pytest.mark.parametrize(
    ("completion", "value", "unparsable"),
    [
        ('{"a": 1}', 1.0, 0.0),
        ('Here:\n```json\n{"a": 1}\n```\nor\n```\n{"a": 2}\n```\n', 1.0, 0.0),
        ('{"a": "1"}', 0.0, 0.0),
        ("{}", 0.0, 0.0),
        ("a = 1", 0.0, 1.0),
        ("[" * 100_000, 0.0, 1.0),
    ],
)
def test_json_of_a_schema(completion, value, unparsable):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert verifiers.json_schema(completion, schema=schema) == Scored(value, extra={"unparsable": unparsable})


def test_lengths_between_two_bounds():
    values = [verifiers.length(text, unit="words", low=2, high=3) for text in ("a", "a b", "a b  c", "a b c d")]
    assert values == [0.0, 1.0, 1.0, 0.0]
    assert verifiers.length("a b", unit="characters", low=3, high=None) == 1.0
    assert verifiers.length("a b", unit="characters", low=4, high=None) == 0.0


@pytest.mark.parametrize(
    ("completion", "verifier", "voted"),
    [
        ("2+2=4#4", "exact", "4"),
        ("so #### 1,200 ", "exact", "1200"),
        ("no mark", "exact", "no mark"),
        ("# Sum\nso #### 1,200 ", "math", "1200"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", "math", r"\frac{1}{2}"),
        (r"\boxed{1", "math", r"\boxed{1"),
        ("it is 7", "math", "it is 7"),
    ],
)
def test_a_vote_is_for_the_answer_without_its_working(completion, verifier, voted):
    assert verifiers.answer(completion, verifier) == voted
