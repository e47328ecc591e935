"""A score is that of the sequence alone, wherever the padding is and whatever lies beside it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_core.models.scorer import Scorer

PAD = 0


def scorer(model_type: str = "llama") -> Scorer:
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=64,
        pad_token_id=PAD,
        num_labels=1,
    )
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        model.score.weight.mul_(50)
    return Scorer(model)


SEQUENCES = [torch.arange(3, 3 + length) % 60 + 3 for length in (5, 14, 1, 8)]


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Hugging Face's own class on each sequence by itself."""
    lm = scorer().lm
    with torch.no_grad():
        return torch.cat([lm(sequence[None]).logits[0] for sequence in SEQUENCES])


@torch.no_grad()
def test_padded_on_the_right_with_batch_mates(alone: torch.Tensor):
    ids = torch.nn.utils.rnn.pad_sequence(SEQUENCES, batch_first=True, padding_value=PAD)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in SEQUENCES], batch_first=True)
    scores = scorer()(ids, mask)[torch.arange(len(SEQUENCES)), mask.sum(1) - 1]
    torch.testing.assert_close(scores, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padded_on_the_left_with_batch_mates(alone: torch.Tensor):
    width = max(map(len, SEQUENCES))
    ids = torch.stack([torch.nn.functional.pad(s, (width - len(s), 0), value=PAD) for s in SEQUENCES])
    mask = torch.stack([torch.arange(width) >= width - len(s) for s in SEQUENCES]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    scores = scorer()(ids, mask, position_ids=positions)[:, -1]
    torch.testing.assert_close(scores, alone, rtol=1e-5, atol=1e-5)
    hugging_face = scorer().lm(ids, attention_mask=mask, position_ids=positions).logits[:, 0]
    torch.testing.assert_close(hugging_face, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_packed_into_one_row(alone: torch.Tensor):
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])[None]
    scores = scorer()(torch.cat(SEQUENCES)[None], position_ids=positions)[0]
    ends = torch.tensor([len(s) for s in SEQUENCES]).cumsum(0) - 1
    torch.testing.assert_close(scores[ends], alone, rtol=1e-5, atol=1e-5)


def test_the_load_balancing_loss_of_a_reward_model_is_that_of_its_body():
    module, ids = scorer("qwen3_moe"), SEQUENCES[1][None]
    body = module.lm.model(ids, output_router_logits=True)
    shares = torch.cat(body.router_logits).softmax(-1)
    chosen = torch.nn.functional.one_hot(shares.topk(2, dim=-1).indices, 4).float()
    # Experts times the sum over experts of (share of choices) * (mean probability), summed over the two choices.
    wanted = 4 * (chosen.mean(0) * shares.mean(0)).sum()
    _, aux = module(ids, position_ids=torch.arange(14)[None], aux_mask=torch.ones(1, 14))
    torch.testing.assert_close(aux, wanted)
