"""The process scorer's logits, and what its configuration keeps. transformers' own forward is the reference."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.models.process_scorer import StepTokens, load_process_scorer
from rlhf_core.models.scratch import write_scratch_model

TOKENS = StepTokens(placeholder=20, verdicts=(22, 21, 25), separator="\n")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("base") / "model"
    write_scratch_model(
        directory, hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_position=32, seed=3
    )
    return str(directory)


def test_logits_are_those_of_the_reward_tokens_at_every_position(base: str) -> None:
    scorer = load_process_scorer(base, tokens=TOKENS, dtype=torch.float32, attention="sdpa")
    ids = torch.tensor([[1, 9, 30, 20, 12, 2], [1, 7, 20, 4, 8, 9]])
    positions = torch.arange(6).expand(2, -1)
    expected = AutoModelForCausalLM.from_pretrained(base)(ids).logits[:, :, [22, 21, 25]]
    given = scorer(ids, position_ids=positions)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
    given.square().sum().backward()
    assert sorted(set(scorer.head.weight.grad.nonzero()[:, 0].tolist())) == [21, 22, 25]


def test_packed_solutions_do_not_see_one_another(base: str) -> None:
    scorer = load_process_scorer(base, tokens=TOKENS, dtype=torch.float32, attention="sdpa").eval()
    one, other = [1, 9, 30, 20], [1, 7, 20]
    together = scorer(torch.tensor([one + other]), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]]))
    alone = [scorer(torch.tensor([ids]), position_ids=torch.arange(len(ids))[None]) for ids in (one, other)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)


def test_tokens_are_kept_in_the_config(base: str, tmp_path: Path) -> None:
    scorer = load_process_scorer(base, tokens=TOKENS, dtype=torch.float32, attention="sdpa")
    scorer.lm.save_pretrained(tmp_path)
    again = load_process_scorer(str(tmp_path), tokens=None, dtype=torch.float32, attention="sdpa")
    assert again.tokens == TOKENS


def test_a_model_that_is_no_process_reward_model_is_refused(base: str) -> None:
    with pytest.raises(
        ValueError, match=r"is no process reward model: its config\.json has no process_reward"
    ) as caught:
        load_process_scorer(base, tokens=None, dtype=torch.float32, attention="sdpa")
    assert "\n" not in str(caught.value)
