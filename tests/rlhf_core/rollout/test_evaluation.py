from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rl import EvaluationSettings
from rlhf_core.rollout.evaluation import Answer, Evaluator, check_best_metric, evaluation_metrics, sampled_metrics
from rlhf_core.rollout.prompts import Prompt
from rlhf_core.rollout.sample import Sample


def test_metrics_of_three_samples_by_hand():
    samples = [
        [(1.0, "7"), (0.0, "8"), (0.0, "8")],  # 1 of 3 right, the majority wrong
        [(1.0, "4"), (1.0, "4"), (0.25, "5")],  # 2 of 3 right, a part of a point for the third
    ]
    found = sampled_metrics(samples, [1, 2, 3])
    assert found == {
        "mean@3": pytest.approx((1 + 2.25) / 6),
        "majority@3": 0.5,
        "pass@1": pytest.approx((1 / 3 + 2 / 3) / 2),
        "pass@2": pytest.approx((2 / 3 + 1) / 2),
        "pass@3": 1.0,
    }


def answer(score: float, tokens: int, truncated: bool = False, **more: Any) -> Answer:
    return Answer("", tokens, truncated, {"exact": score}, vote=str(score), **more)


def test_metrics_are_of_all_prompts_and_of_each_source():
    greedy = [answer(1.0, 4), answer(0.0, 8, True), answer(1.0, 3)]
    sampled = [[answer(1.0, 2), answer(0.0, 4)], [answer(0.0, 8, True), answer(0.0, 8)], [answer(1.0, 1)] * 2]
    settings = EvaluationSettings(samples_per_prompt=2)
    found = evaluation_metrics(greedy, sampled, ["a", "b", "a"], settings)
    assert found == pytest.approx(
        {
            **{"prompts": 3, "exact_match": 2 / 3, "response_tokens_greedy": 5, "truncated_greedy": 1 / 3},
            **{"mean@2": 3 / 6, "majority@2": 2 / 3, "pass@1": 3 / 6, "pass@2": 2 / 3},
            **{"response_tokens_sampled": 24 / 6, "truncated_sampled": 1 / 6},
            **{"prompts/a": 2, "exact_match/a": 1, "response_tokens_greedy/a": 3.5, "truncated_greedy/a": 0},
            **{"mean@2/a": 0.75, "majority@2/a": 1, "pass@1/a": 0.75, "pass@2/a": 1},
            **{"response_tokens_sampled/a": 2, "truncated_sampled/a": 0},
            **{"prompts/b": 1, "exact_match/b": 0, "response_tokens_greedy/b": 8, "truncated_greedy/b": 1},
            **{"mean@2/b": 0, "majority@2/b": 0, "pass@1/b": 0, "pass@2/b": 0},
            **{"response_tokens_sampled/b": 8, "truncated_sampled/b": 0.5},
        }
    )
    without = evaluation_metrics(greedy, [], [None] * 3, EvaluationSettings())
    assert set(without) == {"prompts", "exact_match", "response_tokens_greedy", "truncated_greedy"}


def test_best_metric_of_a_source_wants_prompts_of_it():
    prompts = [Prompt(0, "", (1,), "", "gsm8k"), Prompt(1, "", (1,), "", "aime")]
    check_best_metric("exact_match/aime", prompts)
    check_best_metric("pass@4", [Prompt(0, "", (1,), "")])
    with pytest.raises(SettingsError, match="best_metric 'exact_match/x': the held-out prompts have the sources aime"):
        check_best_metric("exact_match/x", prompts)
    with pytest.raises(SettingsError, match="the held-out prompts name no sources"):
        check_best_metric("exact_match/x", [Prompt(0, "", (1,), "")])


# -- with verifiers -------------------------------------------------------------------------------------------------

STUCK = r"\boxed{9^{9^{9}}}"  # sympy computes on it until it is ended


class Characters:
    """A tokenizer whose ids are code points: it spells everything."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def evaluator(tmp_path: Path, responses: dict[tuple[int, float], list[str]], **settings: Any) -> Any:
    """An evaluator of two prompts and, in place of a sampler, given texts by (prompt's token, temperature)."""
    prompts = [Prompt(7, "2+2=", (5,), "4", "sums"), Prompt(9, "1+1=", (6,), "2")]
    asked = []

    def generate(requests: Any) -> list[Sample]:
        taken = {place: iter(texts) for place, texts in responses.items()}
        asked.append(list(requests))
        found = []
        for request in requests:
            text = next(taken[request.prompt_ids[0], request.temperature])
            ids = tuple(map(ord, text))
            found.append(Sample(request.sample_id, ids, np.zeros(len(ids), np.float32), "stop", 1))
        return found

    given = EvaluationSettings.model_validate(settings)
    return Evaluator(given, prompts, Characters(), max_new_tokens=32, seed=3, scratch=tmp_path), generate, asked


def test_greedy_and_sampled_answers_are_verified_and_the_same_prompts_shown(tmp_path):
    texts = {(5, 0.0): ["2+2=4#4"], (6, 0.0): ["1+1=3#3"], (5, 0.5): ["#4", "4#4"], (6, 0.5): ["#2", "#3"]}
    made, generate, asked = evaluator(tmp_path, texts, samples_per_prompt=2, temperature=0.5, shown_prompts=2)
    with made:
        found = made.run(generate, (1, 2))
        again = made.run(generate, (1, 2))
    assert (found.metrics["exact_match"], found.metrics["mean@2"], found.metrics["pass@2"]) == (0.5, 0.75, 1.0)
    # Two responses of the first prompt differ in their working, and not in the answer that is voted for.
    assert found.metrics["majority@2"] == 1.0
    assert (found.metrics["exact_match/sums"], found.metrics["prompts/sums"]) == (1.0, 1.0)
    assert again.metrics == found.metrics
    shown = made.shown(found)
    assert [list(row) for row in shown] == [list(shown[0])] * 2  # the second prompt names no source
    assert shown[:1] == [
        {"prompt": "2+2=", "label": "4", "source": "sums", "response": "2+2=4#4", "score": 1.0, "tokens": 7,
         "truncated": False}
    ]  # fmt: skip
    seeds = [[request.seed for request in call] for call in asked]
    assert seeds[:2] == seeds[2:]
    assert len(set(seeds[1])) == 4
    assert {request.stop_token_ids for call in asked for request in call} == {(1, 2)}


def test_an_answer_that_math_cannot_judge_in_time_is_wrong_and_counted_apart(tmp_path):
    texts = {(5, 0.0): [STUCK], (6, 0.0): ["1 + 1 is 4/2"]}
    sandbox = {"workers": 1, "timeout_s": 1.0}
    made, generate, _ = evaluator(tmp_path, texts, verifier="math", sandbox=sandbox)
    with made:
        metrics = made.run(generate, (1,)).metrics
    assert metrics["math_match"] == 0.5
    assert metrics["failed/timeout"] == 1
    assert metrics["failed/memory"] == metrics["failed/error"] == metrics["failed/label"] == metrics["unparsable"] == 0
