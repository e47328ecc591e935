"""Rewards of responses that are there already: the mix by hand, failures, and what RL's ranks would read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_models import PLACEHOLDER, RIGHT, WRONG, digits, write_process_model, write_reward_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.sampling import ScorerSettings
from rlhf_core.models.scratch import build_tokenizer
from rlhf_core.rollout.offline_scores import SCORED_AT_ONCE, Answer, OfflineScorer, Scores
from rlhf_core.rollout.prompts import Prompt
from rlhf_core.rollout.reward_sources import RewardSources
from rlhf_core.rollout.rewards import RewardMix
from rlhf_core.rollout.token_scores import Sequences, TokenScores

TOKENIZER = build_tokenizer(64)
RENDERED = "<s><|user|>3+4=<|end|><|assistant|>"
PROMPT = Prompt(0, "3+4=", tuple(TOKENIZER(RENDERED)["input_ids"]), "7")

FUNCTION = """
def reward_func(queries, prompts, labels):
    assert queries[0].startswith("<s><|user|>3+4=<|end|><|assistant|>"), queries
    assert "9" not in queries[0]
    return {"rewards": [0.5 * len(prompts[0])]}
"""


def answer(text: str, group: int = 0) -> Answer:
    return Answer(PROMPT, np.array(TOKENIZER(text)["input_ids"], np.int32), group)


def scored(reward: dict[str, Any], answers: list[Answer], models: Any = None, **mix: float) -> Scores:
    settings = RewardSettings.model_validate(reward)
    with RewardSources(settings) as sources:
        scorer = OfflineScorer(settings, RewardMix(settings, **mix), sources, models, TOKENIZER, batch_size=1)
        return scorer.score(answers, lambda done, total: None)


def test_the_mix_is_the_weighted_sum_with_the_reward_model_normalised() -> None:
    def models(sequences: Sequences) -> list[dict[str, float]]:
        assert all(prompt.tolist() == list(PROMPT.ids) for prompt, _ in sequences)
        return [{"rm": float(len(response)), "prm": 0.25} for _, response in sequences]

    answers = [answer("3+4=7#7<|end|>"), answer("#8<|end|>")]
    scores = scored({"rm": 2.0, "prm": 4.0, "exact": 10.0}, answers, models, rm_mean=1.0, rm_std=2.0)
    # 8 tokens: (8 - 1) / 2 = 3.5, and 3: (3 - 1) / 2 = 1.
    assert scores.texts == ["3+4=7#7", "#8"]
    assert scores.values == [{"rm": 3.5, "prm": 0.25, "exact": 1.0}, {"rm": 1.0, "prm": 0.25, "exact": 0.0}]
    assert scores.totals == [2 * 3.5 + 1.0 + 10.0, 2 * 1.0 + 1.0]


def test_a_failure_drops_its_group_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FUNCTION)
    reward = {"functions": [{"path": f"{tmp_path}/reward.py", "name": "mine"}], "sandbox": {"workers": 1}}
    answers = [answer("#7<|end|>", 0), answer("#9<|end|>", 1), answer("#7<|end|>", 1), answer("#5<|end|>", 2)]
    scores = scored(reward, answers)
    assert scores.totals == [2.0, None, None, 2.0]
    assert scores.metrics["reward/mine/failed/error"] == 1
    assert scores.metrics["reward/dropped_groups"] == 1


def test_order_is_kept_over_many_calls() -> None:
    calls: list[int] = []

    def models(sequences: Sequences) -> list[dict[str, float]]:
        calls.append(len(sequences))
        return [{"rm": float(response[0])} for _, response in sequences]

    answers = [answer(str(n % 10), n) for n in range(2 * SCORED_AT_ONCE + 1)]
    scores = scored({"rm": 1.0}, answers, models)
    assert calls == [SCORED_AT_ONCE, SCORED_AT_ONCE, 1]
    assert scores.totals == [float(one.ids[0]) for one in answers]


@torch.no_grad()
def test_models_score_the_tokens_as_they_were_sampled(tmp_path: Path) -> None:
    """transformers on ids written by hand. A response that was cut off is scored at its last token, without an end."""
    reward, process = write_reward_model(tmp_path / "r"), write_process_model(tmp_path / "p")
    directories = {"rm": str(reward), "prm": str(process)}
    scores = TokenScores(directories, ScorerSettings(dtype="float32", batch_size=2), "product")
    head = np.array([1, 4, *digits("3+4="), 2, 5])
    responses = [[*digits("3,7#7"), 2], digits("3+4"), []]
    found = scores.score([(head, np.array(one, np.int32)) for one in responses])
    lm = AutoModelForSequenceClassification.from_pretrained(reward)
    for one, response in zip(found, responses, strict=True):
        expected = lm(torch.tensor([[*head.tolist(), *response]])).logits.item()
        assert one["rm"] == pytest.approx(expected, rel=1e-4)
    judge = AutoModelForCausalLM.from_pretrained(process)
    ids = [*head.tolist(), *digits("3"), PLACEHOLDER, *digits(",7#7"), PLACEHOLDER]
    first, second = judge(torch.tensor([ids])).logits[0, [9, 14]][:, [RIGHT, WRONG]].softmax(-1)[:, 0].tolist()
    assert found[0]["prm"] == pytest.approx(first * second, rel=1e-4)
    assert found[2]["prm"] == 0.0
