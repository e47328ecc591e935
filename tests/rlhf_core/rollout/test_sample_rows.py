"""Rows from scored samples: by hand, and properties over random scores."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.sampling import PairForm, RejectionForm, SampleSettings
from rlhf_core.rollout.sample_rows import Drawn, best_of_n, make_rows, preference_pairs, rejection


def drawn(text: str, score: float, *, truncated: bool = False) -> Drawn:
    return Drawn(text, score, {"exact": score}, len(text), truncated)


def settings(form: str, **others: Any) -> SampleSettings:
    given = {"samples_per_prompt": 4, "max_new_tokens": 8, "max_prompt_len": 8, "reward": {"exact": 1.0}}
    return SampleSettings.model_validate({"form": form, **given, **others})


FOUR = [drawn("a", 0.5), drawn("b", 2.0), drawn("c", 0.5), drawn("d", -1.0)]

# -- by hand ------------------------------------------------------------------------------------------------------


def test_the_best_is_the_first_with_the_highest_score() -> None:
    assert [one.text for one in best_of_n([drawn("a", 1.0), drawn("b", 3.0), drawn("c", 3.0)])] == ["b"]
    assert best_of_n([]) == []
    assert make_rows(settings("best_of_n"), 0, FOUR).rows == [{"response": "b", "score": 2.0}]


def test_rejection_keeps_what_is_good_enough_once_and_the_best_first() -> None:
    samples = [*FOUR, drawn("b", 2.0), drawn("e", 0.75)]
    made = rejection(samples, RejectionForm(threshold=0.5, max_per_prompt=3))
    assert [row["response"] for row in made.rows] == ["b", "e", "a"]
    assert made.counts == {"samples_duplicate": 1, "samples_below_threshold": 1, "samples_over_limit": 1}


def test_a_sum_of_weights_reaches_the_threshold_of_a_whole_point() -> None:
    whole = 0.6 + 0.3 + 0.1
    assert whole < 1
    assert len(rejection([drawn("a", whole)], RejectionForm(threshold=1.0)).rows) == 1
    assert rejection([drawn("a", 0.999)], RejectionForm(threshold=1.0)).rows == []


def test_the_best_against_the_worst() -> None:
    made = preference_pairs(FOUR, PairForm(), [0])
    assert made.rows == [{"chosen": "b", "rejected": "d", "margin": 3.0}]
    tied = preference_pairs([drawn("a", 1.0), drawn("b", 1.0)], PairForm(), [0])
    assert (tied.rows, tied.counts["pairs_tied"]) == ([], 1)
    alone = preference_pairs([drawn("a", 1.0), drawn("a", 0.0)], PairForm(), [0])
    assert (alone.rows, alone.counts["samples_duplicate"], alone.counts["pairs_tied"]) == ([], 1, 0)


def test_all_pairs_with_enough_margin() -> None:
    made = preference_pairs(FOUR, PairForm(which="all", min_margin=1.5), [0])
    # Of the six, a-c are tied; b-a, b-c, a-d, c-d are 1.5 apart and b-d 3.
    assert [(row["chosen"], row["rejected"], row["margin"]) for row in made.rows] == [
        ("b", "a", 1.5),
        ("a", "d", 1.5),
        ("b", "c", 1.5),
        ("b", "d", 3.0),
        ("c", "d", 1.5),
    ]
    assert made.counts == {"samples_duplicate": 0, "pairs_tied": 1, "pairs_below_margin": 0, "pairs_over_limit": 0}
    few = preference_pairs(FOUR, PairForm(which="all", min_margin=2.0), [0])
    assert (len(few.rows), few.counts["pairs_below_margin"]) == (1, 4)


def test_a_limit_of_pairs_is_drawn_by_the_seed() -> None:
    form = PairForm(which="all", max_per_prompt=2)
    chosen = {tuple(row["rejected"] for row in preference_pairs(FOUR, form, [seed]).rows) for seed in range(20)}
    assert len(chosen) > 3
    assert all(len(one) == 2 for one in chosen)
    first, again = (preference_pairs(FOUR, form, [5]) for _ in range(2))
    assert first == again
    assert first.counts["pairs_over_limit"] == 3


def test_what_was_cut_off_or_is_blank_is_shown_and_makes_no_other_row() -> None:
    samples = [drawn("a", 1.0), drawn("b", 5.0, truncated=True), drawn(" ", 7.0), drawn("", -7.0)]
    assert make_rows(settings("best_of_n"), 0, samples).rows == [{"response": "a", "score": 1.0}]
    assert make_rows(settings("rejection"), 0, samples).rows == [{"response": "a", "score": 1.0}]
    assert make_rows(settings("pairs"), 0, samples).rows == []
    made = make_rows(settings("generations"), 0, samples)
    assert len(made.rows) == 4
    assert made.rows[1] == {"response": "b", "score": 5.0, "rewards": {"exact": 5.0}, "tokens": 1, "truncated": True}
    assert made.counts == Counter()


# -- properties ---------------------------------------------------------------------------------------------------

SCORES = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-3, 3)), max_size=8)
FORMS = st.builds(
    PairForm, which=st.just("all"), min_margin=st.sampled_from([0, 1, 2]), max_per_prompt=st.sampled_from([None, 1, 4])
)


@given(SCORES, FORMS)
def test_every_candidate_is_a_pair_or_counted(scores: list[tuple[str, int]], form: PairForm) -> None:
    samples = [drawn(text, float(score)) for text, score in scores]
    made = preference_pairs(samples, form, [1])
    first = dict(reversed(scores))
    assert made.counts["samples_duplicate"] == len(scores) - len(first)
    lost = sum(count for name, count in made.counts.items() if name.startswith("pairs_"))
    assert len(made.rows) + lost == len(first) * (len(first) - 1) // 2
    for row in made.rows:
        assert row["margin"] == first[row["chosen"]] - first[row["rejected"]] >= max(form.min_margin, 1)
    assert form.max_per_prompt is None or len(made.rows) <= form.max_per_prompt


@given(SCORES)
def test_best_against_worst_has_the_widest_margin(scores: list[tuple[str, int]]) -> None:
    samples = [drawn(text, float(score)) for text, score in scores]
    pair = preference_pairs(samples, PairForm(), [1]).rows
    every = preference_pairs(samples, PairForm(which="all"), [1]).rows
    widest = sorted((row["margin"] for row in every), reverse=True)[:1]
    assert [row["margin"] for row in pair] == widest


@given(SCORES, st.integers(-3, 3), st.sampled_from([None, 1, 3]))
def test_rejection_loses_nothing_uncounted(scores: list[tuple[str, int]], threshold: int, most: int | None) -> None:
    samples = [drawn(text, float(score)) for text, score in scores]
    made = rejection(samples, RejectionForm(threshold=threshold, max_per_prompt=most))
    assert len(made.rows) + sum(made.counts.values()) == len(scores)
    kept = [row["score"] for row in made.rows]
    assert kept == sorted(kept, reverse=True)
    assert all(score >= threshold for score in kept)
    assert len({row["response"] for row in made.rows}) == len(kept)
