import json
import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from rlhf_core.data.arithmetic import (
    ArithmeticSpec,
    Split,
    pair_rows,
    problem,
    problems,
    prompt_rows,
    sft_rows,
    solution,
    step_rows,
    wrong_solutions,
)
from rlhf_core.rollout.verifiers import exact

TRAIN = ArithmeticSpec(seed=0)
HELDOUT = ArithmeticSpec(seed=0, split="heldout")
SFT_SEED_3 = [
    {"prompt": "4+1+8=", "response": "4+1=5,5+8=13#13"},
    {"prompt": "5+6+0=", "response": "5+6=11,11+0=11#11"},
]
PAIRS_SEED_3 = [
    {"prompt": "4+7+0=", "chosen": "4+7=11,11+0=11#11", "rejected": "4+7=11,11+0=12#12"},
    {"prompt": "6+1+0=", "chosen": "6+1=7,7+0=7#7", "rejected": "6+1=7,7+0=17#17"},
]
STEP = re.compile(r"(\d+)\+(\d+)=(\d+)")


def is_right(prompt: str, response: str) -> bool:
    """An independent reading: each step computes rightly, uses the next term, and goes on from the last value."""
    terms = [int(t) for t in prompt.removesuffix("=").split("+")]
    body, _, answer = response.partition("#")
    value = terms[0]
    steps = body.split(",")
    if len(steps) != len(terms) - 1:
        return False
    for term, step in zip(terms[1:], steps, strict=True):
        if step != f"{value}+{term}={value + term}":
            return False
        value += term
    return answer == str(value)


def test_the_written_form_is_the_documented_one():
    assert problem((3, 4, 5)) == "3+4+5="
    assert solution((3, 4, 5)) == "3+4=7,7+5=12#12"
    assert solution((9, 9)) == "9+9=18#18"


def test_splits_cover_every_problem_once_and_share_no_multiset():
    train, heldout = problems(TRAIN), problems(HELDOUT)
    assert len(train) + len(heldout) == 10**2 + 10**3
    assert set(train) | set(heldout) == {
        *((a, b) for a in range(10) for b in range(10)),
        *((a, b, c) for a in range(10) for b in range(10) for c in range(10)),
    }
    assert {tuple(sorted(t)) for t in train}.isdisjoint({tuple(sorted(t)) for t in heldout})
    assert 0.15 < len(heldout) / 1100 < 0.25


def test_the_split_follows_split_seed_and_not_seed():
    assert problems(replace(HELDOUT, seed=7)) == problems(HELDOUT)
    assert problems(replace(HELDOUT, split_seed=7)) != problems(HELDOUT)


@pytest.mark.parametrize("make", [sft_rows, pair_rows, step_rows, prompt_rows])
def test_rows_are_a_function_of_the_spec(make):
    spec = replace(TRAIN, rows=50)
    rows = make(spec)
    assert len(rows) == 50
    assert json.loads(json.dumps(rows)) == rows == make(spec)
    assert rows != make(replace(spec, seed=1))
    assert make(replace(TRAIN, rows=20)) == rows[:20]
    heldout = make(replace(spec, split="heldout"))
    assert {r["prompt"] for r in rows}.isdisjoint({r["prompt"] for r in heldout})


def test_rows_are_the_same_in_every_process():
    # Written once from this generator: a change of these rows has to raise GENERATOR_VERSION.
    assert sft_rows(ArithmeticSpec(seed=3, rows=2)) == SFT_SEED_3
    assert pair_rows(ArithmeticSpec(seed=3, rows=2)) == PAIRS_SEED_3


def test_sft_rows_pass_over_all_problems_before_any_comes_again():
    count = len(problems(TRAIN))
    prompts = [r["prompt"] for r in sft_rows(replace(TRAIN, rows=2 * count))]
    assert set(prompts[:count]) == set(prompts[count:]) == {problem(t) for t in problems(TRAIN)}
    assert prompts[:count] != prompts[count:]
    assert len(sft_rows(TRAIN)) == count


def test_sft_responses_are_right():
    assert all(is_right(r["prompt"], r["response"]) for r in sft_rows(TRAIN))


@pytest.mark.parametrize("split", get_args(Split))
def test_pairs_are_one_right_and_one_wrong_solution_of_one_form(split):
    for row in pair_rows(replace(TRAIN, split=split, rows=2000)):
        answer = row["chosen"].rpartition("#")[2]
        assert is_right(row["prompt"], row["chosen"])
        assert not exact(row["rejected"], answer)
        shape = [re.sub(r"\d+", "n", row[side]) for side in ("chosen", "rejected")]
        assert shape[0] == shape[1]
        *_, (_, _, last) = STEP.findall(row["rejected"])
        assert row["rejected"].endswith(f"={last}#{last}")


def test_wrong_solutions_are_of_the_four_kinds():
    def texts(terms, kind):
        return {"".join(w.steps) for w in wrong_solutions(terms, 9) if w.kind == kind}

    assert texts((3, 4, 8), "off_by_one") == {"3+4=7,7+8=14#14", "3+4=7,7+8=16#16"}
    assert texts((3, 4, 8), "lost_carry") == {"3+4=7,7+8=5#5", "3+4=7,7+8=25#25"}
    assert texts((3, 4, 4), "skipped_term") == {"3+3=6,6+4=10#10", "3+4=7,7+3=10#10", "4+4=8,8+4=12#12"}
    assert texts((9, 0, 5), "carried_on") == {"9+0=8,8+5=13#13", "9+0=10,10+5=15#15"}
    assert texts((9, 9), "off_by_one") == {"9+9=17#17"}, "19 is no sum of two numbers up to 9: it would tell"
    assert texts((0, 0), "off_by_one") == {"0+0=1#1"}
    assert texts((4, 4), "skipped_term") == set()


def test_every_problem_has_wrong_solutions_and_all_are_wrong():
    for terms in problems(TRAIN) + problems(HELDOUT):
        wrong = wrong_solutions(terms, 9)
        assert wrong
        assert not any(exact("".join(w.steps), str(sum(terms))) for w in wrong)


def test_step_labels_are_true_until_the_first_wrong_step():
    rows = step_rows(replace(TRAIN, rows=2000))
    for row in rows:
        terms = [int(t) for t in row["prompt"].removesuffix("=").split("+")]
        right = solution(tuple(terms)).split(",")
        given = "".join(row["steps"]).split(",")
        assert [s.rstrip(",") for s in row["steps"]] == given
        expected, good = [], True
        for step, correct in zip(given, right, strict=True):
            good = good and step == correct
            expected.append(good)
        assert row["labels"] == expected
    assert sum(all(r["labels"]) for r in rows) == 1000
    carried = [r for r in rows if r["labels"] == [False, False]]
    assert any(int(a) + int(b) == int(c) for r in carried for a, b, c in [STEP.findall(r["steps"][1])[0]]), (
        "a right computation from a wrong value is labelled False"
    )


def test_prompts_carry_the_true_answer_and_never_repeat():
    rows = prompt_rows(HELDOUT)
    assert len({r["prompt"] for r in rows}) == len(rows) == len(problems(HELDOUT))
    assert all(int(r["label"]) == sum(int(t) for t in re.findall(r"\d+", r["prompt"])) for r in rows)
    with pytest.raises(ValueError, match=f"rows is 5000, but the heldout split has {len(rows)} problems"):
        prompt_rows(replace(HELDOUT, rows=5000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows is 0; give at least 1"),
        ({"max_number": 0}, "max_number is 0; give at least 1"),
        ({"terms": (1, 2)}, r"terms is \(1, 2\); give one or more"),
        ({"split": "test"}, "split is 'test'; give 'train' or 'heldout'"),
        ({"heldout_fraction": 1.0}, "heldout_fraction is 1.0; give a number between 0 and 1"),
        ({"max_number": 999, "terms": (3,)}, "makes 1000000000 problems; at most 2000000"),
    ],
)
def test_a_bad_spec_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TRAIN, **change)


def test_a_split_without_problems_is_refused():
    spec = replace(HELDOUT, max_number=1, terms=(2,), heldout_fraction=1e-6)
    with pytest.raises(ValueError, match="no problem falls into the heldout split"):
        problems(spec)


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_bag_of_characters_does_not_tell_right_from_wrong(seed, with_prompt):
    """Below 60 %, on held-out problems' pairs and on unseen pairs of training problems, by response and by pair."""
    train = pair_rows(ArithmeticSpec(seed, 8000))
    unseen = {"heldout": pair_rows(ArithmeticSpec(seed, 3000, split="heldout")), "train": train[6000:]}
    vectorizer = CountVectorizer(analyzer="char", lowercase=False).fit([r["prompt"] + r["chosen"] + "#" for r in train])

    def counts(rows, side):
        return vectorizer.transform([(r["prompt"] + " " if with_prompt else "") + r[side] for r in rows]).toarray()

    chosen, rejected = counts(train[:6000], "chosen"), counts(train[:6000], "rejected")
    ones, zeros = np.ones(6000), np.zeros(6000)
    single = LogisticRegression(max_iter=2000).fit(np.r_[chosen, rejected], np.r_[ones, zeros])
    differences = np.r_[chosen - rejected, rejected - chosen]
    paired = LogisticRegression(max_iter=2000, fit_intercept=False).fit(differences, np.r_[ones, zeros])
    for name, rows in unseen.items():
        right, wrong = counts(rows, "chosen"), counts(rows, "rejected")
        by_response = (single.predict(right).mean() + 1 - single.predict(wrong).mean()) / 2
        gap = paired.decision_function(right - wrong)
        by_pair = ((gap > 0) + 0.5 * (gap == 0)).mean()
        assert max(by_response, by_pair) < 0.6, f"{name}: by response {by_response:.3f}, by pair {by_pair:.3f}"


@pytest.mark.parametrize("make", [pair_rows, step_rows])
def test_lengths_and_character_counts_balance(make):
    right, wrong = [], []
    for row in make(replace(TRAIN, rows=4000)):
        if make is pair_rows:
            right.append(row["chosen"])
            wrong.append(row["rejected"])
        elif not all(row["labels"]):
            right.append(solution(tuple(int(t) for t in re.findall(r"\d+", row["prompt"]))))
            wrong.append("".join(row["steps"]))
    for character in "0123456789+=,#":
        assert abs("".join(right).count(character) - "".join(wrong).count(character)) <= 20
    longer = sum(len(w) > len(r) for r, w in zip(right, wrong, strict=True))
    shorter = sum(len(w) < len(r) for r, w in zip(right, wrong, strict=True))
    assert longer > 100
    assert 0.85 < longer / shorter < 1.18
