"""Objectives on tensors alone: what is masked reaches neither loss nor gradient, what is trained on is the response."""

from typing import Any

import pytest
import torch

from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.training.rl_objectives import PTX, PolicyObjective, PtxObjective, ValueObjective, state_values

RL_FIELDS = {"policy": ("old_logprobs", "advantages", "loss_weights"), "value": ("old_values", "returns")}
NAN = float("nan")


def objective_of(kind: str) -> Any:
    return policy_objective() if kind == "policy" else ValueObjective(AlgorithmSettings())


def policy_objective(**settings: Any) -> PolicyObjective:
    algorithm = AlgorithmSettings(**settings)
    return PolicyObjective(algorithm, temperature=1.0, kl_coef=algorithm.kl.coef, max_new_tokens=8)


def batch_of(mask: torch.Tensor, **values: torch.Tensor) -> dict[str, torch.Tensor]:
    """A row for each trajectory, without fill."""
    rows, columns = mask.shape
    return {
        "input_ids": torch.ones_like(mask).long(),
        "position_ids": torch.arange(columns).expand(rows, columns),
        "segments": torch.arange(rows).unsqueeze(1).expand(rows, columns),
        "weights": mask.float(),
        "real": torch.ones(rows),
        "loss_weights": torch.ones(rows, columns),
        **values,
    }


def rl_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 0]]).bool()
    drawn = {name: torch.randn(mask.shape, generator=generator) for names in RL_FIELDS.values() for name in names}
    return batch_of(mask, **drawn)


def loss_and_gradient(kind: str, batch: Any, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = outputs.clone().requires_grad_(True)
    parts = objective_of(kind).loss(batch, outputs)
    (term,) = parts.terms.values()
    term.numerator.backward()
    assert outputs.grad is not None
    return term.numerator.detach(), outputs.grad


def test_rows_of_ptx_have_a_loss_of_their_own_at_temperature_1() -> None:
    """Of two rows with 2 + 1 target tokens, one of them of weight 0.5."""
    policy = PolicyObjective(AlgorithmSettings(), temperature=0.7, kl_coef=0.0, max_new_tokens=8)
    objective = PtxObjective(policy, coef=0.5)
    trajectories = rl_batch()
    rows = {**batch_of(torch.tensor([[0, 1, 1], [0, 0, 0.5]])), PTX: torch.ones(())}
    assert objective.denominators(trajectories) == policy.denominators(trajectories)
    assert objective.denominators(rows) == {"ptx": 2.5}
    assert objective.forward_inputs(trajectories)["temperature"] == 0.7
    assert "temperature" not in objective.forward_inputs(rows)
    parts = objective.loss(rows, torch.tensor([[0.0, -1.0, -2.0], [0.0, NAN, -4.0]]))
    assert parts.terms["ptx"].numerator.item() == pytest.approx(1 + 2 + 0.5 * 4)
    assert parts.terms["ptx"].weight == 0.5
    assert [float(value) for value in parts.metrics["ptx_loss"]] == [5.0, 2.5]


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_nan_at_masked_positions_reaches_nothing(kind: str) -> None:
    batch = rl_batch()
    outputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    clean_loss, clean_gradient = loss_and_gradient(kind, batch, outputs)
    mask = batch["weights"] > 0
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
    given = {"old_logprobs": torch.zeros(1, 1), "advantages": torch.tensor([[advantage]])}
    parts = policy_objective(**clip).loss(batch_of(torch.tensor([[True]]), **given), ratio.log())
    assert parts.terms["policy"].numerator.item() == pytest.approx(expected)


@pytest.mark.parametrize(("clip", "expected"), [(0.5, 0.5 * 2.5**2), (0.1, 0.5 * 2.9**2), (3.0, 0.5 * 1.0**2)])
def test_clip_of_values_reaches_their_loss(clip: float, expected: float) -> None:
    """The value moved from 1 to 3, the return is 4: kept within `clip` of 1 it is further off."""
    given = {"old_values": torch.tensor([[0.0, 1.0]]), "returns": torch.tensor([[0.0, 4.0]])}
    batch = batch_of(torch.tensor([[False, True]]), **given)
    parts = ValueObjective(AlgorithmSettings(value_clip=clip)).loss(batch, torch.tensor([[3.0, 0.0]]))
    assert parts.terms["value"].numerator.item() == pytest.approx(expected)


def test_value_of_a_state_is_the_score_before_the_token() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert state_values(scores).tolist() == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]


def test_kl_and_entropy_are_terms_with_their_coefficients() -> None:
    """Sequence mean over responses of 2 and 1 tokens, by hand."""
    mask = torch.tensor([[True, True], [True, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, NAN]])
    entropies = torch.tensor([[0.3, 0.5], [0.9, NAN]])
    reference = torch.tensor([[-1.5, -2.0], [-1.5, NAN]])
    given = {"old_logprobs": logprobs, "ref_logprobs": reference, "advantages": torch.zeros(2, 2)}
    kl = {"coef": 0.1, "estimator": "k2", "place": "loss"}
    objective = policy_objective(kl=kl, entropy_coef=0.2, aggregation="sequence_mean")
    batch = batch_of(mask, **given)
    parts = objective.loss(batch, torch.stack([logprobs, entropies]))
    assert objective.denominators(batch) == {"policy": 2.0, "kl": 2.0, "entropy": 2.0}
    assert objective.forward_inputs(batch)["entropy"] is True
    assert parts.terms["kl"].weight == 0.1
    assert parts.terms["kl"].numerator.item() == pytest.approx((0.5 * 0.5**2 + 0.0) / 2 + 0.5 * 1.0)
    assert parts.terms["entropy"].weight == -0.2
    assert parts.terms["entropy"].numerator.item() == pytest.approx((0.3 + 0.5) / 2 + 0.9)
    for name, expected in {"kl_loss": 0.5 * 0.25 + 0.5, "entropy": 1.7}.items():
        total, count = parts.metrics[name]
        assert (float(total), float(count)) == (pytest.approx(expected), 3.0)


def test_kl_in_the_reward_is_no_term() -> None:
    mask = torch.tensor([[True]])
    given = {"old_logprobs": torch.zeros(1, 1), "advantages": torch.ones(1, 1)}
    assert policy_objective().denominators(batch_of(mask, **given)) == {"policy": 1.0}
    assert set(policy_objective().loss(batch_of(mask, **given), torch.zeros(1, 1)).terms) == {"policy"}
