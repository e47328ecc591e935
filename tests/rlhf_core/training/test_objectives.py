"""Objectives on tensors alone: what is masked reaches neither loss nor gradient, what is trained on is the response."""

from typing import Any

import pytest
import torch

from rlhf_core.config.rl import AlgorithmSettings
from rlhf_core.training.rl_objectives import PolicyObjective, ValueObjective, state_values

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
