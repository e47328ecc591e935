"""Objectives on tensors alone: what is masked reaches neither loss nor gradient, what is trained on is the response."""

from typing import Any

import pytest
import torch

from rlhf_core.config.rl import AlgorithmSettings
from rlhf_core.data.batches import render_exchange
from rlhf_core.models.scratch import build_tokenizer
from rlhf_core.training.rl_objectives import PolicyObjective, ValueObjective, state_values
from rlhf_core.training.supervised_objectives import PairwiseObjective, SftObjective, pair_batch, sft_batch

RL_FIELDS = {"policy": ("old_logprobs", "advantages"), "value": ("old_values", "returns")}
NAN = float("nan")


def objective_of(kind: str) -> Any:
    return PolicyObjective(AlgorithmSettings(), 1.0) if kind == "policy" else ValueObjective(AlgorithmSettings())


def rl_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 0]]).bool()
    drawn = {name: torch.randn(mask.shape, generator=generator) for names in RL_FIELDS.values() for name in names}
    return {"input_ids": torch.ones_like(mask).long(), "attention_mask": mask.long(), "action_mask": mask, **drawn}


def loss_and_gradient(kind: str, batch: Any, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = outputs.clone().requires_grad_(True)
    parts = objective_of(kind).loss(batch, outputs)
    (term,) = parts.terms.values()
    term.numerator.backward()
    assert outputs.grad is not None
    return term.numerator.detach(), outputs.grad


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_nan_at_masked_positions_reaches_nothing(kind: str) -> None:
    batch = rl_batch()
    outputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    clean_loss, clean_gradient = loss_and_gradient(kind, batch, outputs)
    mask = batch["action_mask"]
    dirty = {**batch, **{name: torch.where(mask, batch[name], NAN) for name in RL_FIELDS[kind]}}
    # The value of the state before token t is the output at t - 1.
    used = mask if kind == "policy" else torch.nn.functional.pad(mask[:, 1:], (0, 1))
    loss, gradient = loss_and_gradient(kind, dirty, torch.where(used, outputs, NAN))
    assert torch.isfinite(clean_loss)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(gradient, clean_gradient)
    assert bool((gradient[~used] == 0).all())
    metrics = objective_of(kind).loss(dirty, torch.where(used, outputs, NAN)).metrics
    assert all(torch.isfinite(torch.as_tensor(total)) for total, _ in metrics.values())


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_nan_at_a_valid_position_shows(kind: str) -> None:
    outputs = torch.zeros(2, 6)
    for name in RL_FIELDS[kind]:
        batch = rl_batch()
        batch[name][0, 3] = NAN
        loss, _ = loss_and_gradient(kind, batch, outputs)
        assert torch.isnan(loss), name
    outputs[0, 3 if kind == "policy" else 2] = NAN
    assert torch.isnan(loss_and_gradient(kind, rl_batch(), outputs)[0])


@pytest.mark.parametrize(
    ("clip", "advantage", "expected"),
    [
        # Ratio 1.5: -ratio * advantage, or -bound * advantage where that is larger.
        ({"clip_low": 0.9, "clip_high": 0.3}, 2.0, -2.6),
        ({"clip_low": 0.9, "clip_high": 0.6}, 2.0, -3.0),
        # Ratio 0.5, with a negative advantage.
        ({"clip_low": 0.1, "clip_high": 9.0}, -2.0, 1.8),
        ({"clip_low": 0.6, "clip_high": 9.0}, -2.0, 1.0),
    ],
)
def test_each_clip_of_the_policy_reaches_its_loss(clip: dict[str, float], advantage: float, expected: float) -> None:
    ratio = torch.tensor([[1.5 if advantage > 0 else 0.5]])
    batch = {
        "action_mask": torch.tensor([[True]]),
        "old_logprobs": torch.zeros(1, 1),
        "advantages": torch.tensor([[advantage]]),
    }
    parts = PolicyObjective(AlgorithmSettings(**clip), 1.0).loss(batch, ratio.log())
    assert parts.terms["policy"].numerator.item() == pytest.approx(expected)


@pytest.mark.parametrize(("clip", "expected"), [(0.5, 0.5 * 2.5**2), (0.1, 0.5 * 2.9**2), (3.0, 0.5 * 1.0**2)])
def test_clip_of_values_reaches_their_loss(clip: float, expected: float) -> None:
    """The value moved from 1 to 3, the return is 4: kept within `clip` of 1 it is further off."""
    batch = {
        "action_mask": torch.tensor([[False, True]]),
        "old_values": torch.tensor([[0.0, 1.0]]),
        "returns": torch.tensor([[0.0, 4.0]]),
    }
    parts = ValueObjective(AlgorithmSettings(value_clip=clip)).loss(batch, torch.tensor([[3.0, 0.0]]))
    assert parts.terms["value"].numerator.item() == pytest.approx(expected)


def test_value_of_a_state_is_the_score_before_the_token() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert state_values(scores).tolist() == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]


def test_sft_trains_the_response_from_its_first_token_to_its_end_token() -> None:
    tokenizer = build_tokenizer(64)
    rows = [render_exchange(tokenizer, "3+4=", "3+4=7#7"), render_exchange(tokenizer, "1+1+1=", "3")]
    batch = sft_batch(rows, tokenizer.pad_token_id)
    trained = [tokenizer.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)]
    assert trained == ["3+4=7#7<|end|>", "3<|end|>"]
    # Minus log-prob of token t is 2**t: the sum tells which tokens are in it.
    outputs = -(2.0 ** torch.arange(batch["input_ids"].shape[1])).expand(2, -1)
    # <s><|user|>3+4=<|end|><|assistant|> are 8 tokens, <s><|user|>1+1+1=<|end|><|assistant|> are 10.
    expected = sum(2**t for t in range(8, 16)) + sum(2**t for t in (10, 11))
    parts = SftObjective().loss(batch, outputs)
    assert parts.terms["nll"].numerator.item() == expected
    assert SftObjective().denominators(batch) == {"nll": 10.0}


def test_pairwise_fill_counts_nowhere() -> None:
    tokenizer = build_tokenizer(64)
    pair = (render_exchange(tokenizer, "3+4=", "7"), render_exchange(tokenizer, "3+4=", "8888"))
    batch = pair_batch([pair, pair], tokenizer.pad_token_id)
    batch["weight"] = torch.tensor([1.0, 0.0])
    scores = torch.zeros(batch["input_ids"].shape)
    scores[0, 9], scores[2, 12] = 2.0, 0.5  # last tokens: 8 of the prompt, 1 or 4 digits, the end token
    scores[1], scores[3] = NAN, NAN
    scores.requires_grad_(True)
    objective = PairwiseObjective()
    parts = objective.loss(batch, scores)
    parts.terms["pairwise"].numerator.backward()
    assert parts.terms["pairwise"].numerator.item() == pytest.approx(0.20141328)  # log(1 + exp(-1.5))
    assert objective.denominators(batch) == {"pairwise": 1.0}
    assert {name: (float(a), float(b)) for name, (a, b) in parts.metrics.items()} == {
        "accuracy": (1.0, 1.0),
        "margin": (1.5, 1.0),
        "score": (2.5, 2.0),
        "score squared": (4.25, 2.0),
    }
    gradient = scores.grad
    assert gradient is not None
    assert gradient.nonzero().tolist() == [[0, 9], [2, 12]]
