"""What is served: scores of texts. transformers on tokens written by hand is the reference."""

from pathlib import Path

import pytest
import torch
from reward_models import PLACEHOLDER, RIGHT, WRONG, base_model, digits, write_process_model, write_reward_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.base import SettingsError
from rlhf_core.rollout.reward_models import QueryError, RewardModel, load_reward_model

QUERIES = ["<s><|user|>3+4=<|end|><|assistant|>3+4=7#7<|end|>", "<s><|user|>9=<|end|><|assistant|>9", "1"]
IDS = [
    [1, 4, *digits("3+4="), 2, 5, *digits("3+4=7#7"), 2],
    [1, 4, *digits("9="), 2, 5, *digits("9"), 2],
    [*digits("1"), 2],
]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_process_model(tmp_path_factory.mktemp("prm"))


def load(directory: Path, **options: object) -> RewardModel:
    return load_reward_model(directory, device="cpu", dtype="float32", **options)  # type: ignore[arg-type]


@torch.no_grad()
def test_scores_are_those_of_transformers_at_the_end_token(reward: Path) -> None:
    model = load(reward)
    found = [one.reward for one in model.score([model.encode(query, None) for query in QUERIES])]
    lm = AutoModelForSequenceClassification.from_pretrained(reward)
    expected = [lm(torch.tensor([ids])).logits.item() for ids in IDS]
    assert found == pytest.approx(expected, rel=1e-4)
    assert max(expected) - min(expected) > 0.1
    # By hand, from mean 0.5 and std 2.
    scaled = load(reward, normalize=True)
    assert scaled.score([scaled.encode(QUERIES[0], None)])[0].reward == pytest.approx((expected[0] - 0.5) / 2, rel=1e-4)


def test_padding_around_a_query_does_not_count(reward: Path) -> None:
    model = load(reward)
    assert model.encode(f"<pad><pad>{QUERIES[0]}<pad>", None).ids.tolist() == IDS[0]


@pytest.mark.parametrize("prompt", ["3+4=", "<s><|user|>3+4=<|end|><|assistant|>"])
@torch.no_grad()
def test_steps_are_judged_at_their_placeholders(process: Path, prompt: str) -> None:
    model = load(process, aggregate="product")
    query = "<s><|user|>3+4=<|end|><|assistant|>3,7#7<|end|>"
    (found,) = model.score([model.encode(query, prompt)])
    ids = [1, 4, *digits("3+4="), 2, 5, *digits("3"), PLACEHOLDER, *digits(",7#7"), PLACEHOLDER]
    lm = AutoModelForCausalLM.from_pretrained(process)
    first, second = lm(torch.tensor([ids])).logits[0, [9, 14]][:, [RIGHT, WRONG]].softmax(-1)[:, 0].tolist()
    assert found.steps == pytest.approx([first, second], rel=1e-4)
    assert found.reward == pytest.approx(first * second, rel=1e-4)


def test_a_response_without_a_step_has_none(process: Path) -> None:
    model = load(process)
    query = "<s><|user|>3+4=<|end|><|assistant|>"
    with_step = model.encode(f"{query}3", "3+4=")
    (empty, other) = model.score([model.encode(query, "3+4="), with_step])
    assert (empty.reward, empty.steps) == (0.0, [])
    assert other.steps is not None
    assert len(other.steps) == 1


def test_queries_that_cannot_be_read(reward: Path, process: Path) -> None:
    for model, query, prompt, fault in [
        (load(reward), "1" * 40, None, "has 41 tokens, more than 32"),
        (load(reward, max_tokens=4), "1234", None, "has 5 tokens, more than 4"),
        (load(process), "1", None, "needs `prompts`"),
        (load(process), "1", "2", "does not start with its prompt"),
        (load(process), "", "", "is empty"),
    ]:
        with pytest.raises(QueryError, match=fault):
            model.encode(query, prompt)


def test_other_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config.json cannot be read: .*give a model's directory"):
        load(tmp_path)
    with pytest.raises(SettingsError, match=r"is no reward model .*give the model of a stage rm or prm"):
        load(base_model(tmp_path))
    with pytest.raises(SettingsError, match="has no mean and std"):
        load(write_reward_model(tmp_path / "other", statistics=None), normalize=True)
