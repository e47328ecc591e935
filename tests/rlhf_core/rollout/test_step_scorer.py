"""Scores of new solutions. transformers on tokens written by hand is the reference."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.models.process_scorer import StepTokens, load_process_scorer
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.rollout.step_scorer import StepScorer, score_steps

# Of the scratch tokenizer's ids: 0 <pad>, 1 <s>, 2 <|end|>, 4 <|user|>, 5 <|assistant|>, then 0123456789+=,#
PLACEHOLDER, RIGHT, WRONG = 20, 21, 22
PROMPTS = ["3+4=", "12+7=", "5=", "9+9="]
STEPS = [["3+4", "7", "#7"], ["12+7=19"], [], ["9", "18", "#18", "1", "1"]]


def digits(text: str) -> list[int]:
    return [6 + "0123456789+=,#".index(character) for character in text]


def by_hand(prompt: str, steps: list[str], separator: str = ",") -> tuple[list[int], list[int]]:
    """<s><|user|>prompt<|end|><|assistant|>step P separator step P ..., and where the placeholders P are."""
    ids, places = [1, 4, *digits(prompt), 2, 5], []
    for number, step in enumerate(steps):
        ids += [*(digits(separator) if number else []), *digits(step), PLACEHOLDER]
        places.append(len(ids) - 1)
    return ids, places


def process_model(directory: Path, template: str | None = None) -> Path:
    base = write_scratch_model(
        directory / "base", hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_position=32, seed=3
    )
    tokens = StepTokens(PLACEHOLDER, (RIGHT, WRONG), ",", template)
    scorer = load_process_scorer(str(base), tokens=tokens, dtype=torch.float32, attention="sdpa")
    with torch.no_grad():
        for parameter in scorer.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # verdicts far from one half
    scorer.lm.save_pretrained(directory / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return process_model(tmp_path_factory.mktemp("prm"))


def test_scores_are_the_models_verdicts_at_the_placeholders(model: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model)
    scores = score_steps(model, PROMPTS, STEPS)
    assert [len(own) for own in scores] == [3, 1, 0, 5]
    for prompt, steps, own in zip(PROMPTS, STEPS, scores, strict=True):
        if steps:
            ids, places = by_hand(prompt, steps)
            logits = lm(torch.tensor([ids])).logits[0, places][:, [RIGHT, WRONG]]
            torch.testing.assert_close(torch.tensor(own), logits.softmax(-1)[:, 0], rtol=1e-5, atol=1e-6)
    flat = [score for own in scores for score in own]
    assert max(flat) - min(flat) > 0.1


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_scores_do_not_depend_on_the_batch(model: Path, batch_size: int) -> None:
    scorer = StepScorer(model)
    together = scorer(PROMPTS, STEPS)
    parts = scorer(PROMPTS, STEPS, batch_size=batch_size)
    backwards = scorer(PROMPTS[::-1], STEPS[::-1], batch_size=batch_size)[::-1]
    for given in (parts, backwards):
        for own, expected in zip(given, together, strict=True):
            assert own == pytest.approx(expected, abs=1e-5)


def test_messages_are_prompts_as_well(model: Path) -> None:
    scorer = StepScorer(model)
    as_messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert scorer(as_messages, STEPS) == scorer(PROMPTS, STEPS)


def test_prompts_go_through_the_template_of_training(tmp_path: Path) -> None:
    directory = process_model(tmp_path, template="#{}#")
    lm = AutoModelForCausalLM.from_pretrained(directory)
    (scores,) = score_steps(directory, ["3+4="], [["7", "8"]])
    ids = [*digits("#3+4=#7"), PLACEHOLDER, *digits(",8"), PLACEHOLDER]
    logits = lm(torch.tensor([ids])).logits[0, [7, 10]][:, [RIGHT, WRONG]]
    assert scores == pytest.approx(logits.softmax(-1)[:, 0].tolist(), abs=1e-6)


def test_a_solution_that_is_too_long_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"solution 3 cannot be scored: .*longer than max_len \(32 tokens\)"):
        score_steps(model, ["1=", "2=", "3="], [["1"], [], ["1" * 30]])


def test_no_solution_no_score(model: Path) -> None:
    assert score_steps(model, [], []) == []
    assert score_steps(model, ["1="], [[]]) == [[]]
