"""Expected values come from NumPy loops written from the papers' formulas, or from finite differences."""

import math

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.advantages import gae, kl_k1, token_rewards, whiten
from rlhf_core.algorithms.masked import masked_sum
from rlhf_core.algorithms.ppo import policy_loss, value_loss

RNG = np.random.default_rng(0)


def tensor(*shape):
    return torch.tensor(RNG.normal(size=shape), dtype=torch.float64)


def test_masked_reductions_ignore_nan_at_masked_places_and_show_it_at_valid_ones():
    values = torch.tensor([[1.0, math.nan, 3.0]], requires_grad=True)
    total = masked_sum(values, torch.tensor([[1, 0, 1]]))
    total.backward()
    assert total.item() == 4.0
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 1.0]]
    assert math.isnan(masked_sum(values, torch.tensor([[1, 1, 1]])).item())


def reference_gae(rewards, values, gamma, lam):
    """A_t = sum over l of (gamma * lambda)^l * delta_{t+l}, Schulman et al. 2016, eq. 16, written out."""
    steps = len(rewards)
    nexts = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * nexts[t] - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(steps - t)) for t in range(steps)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_gae_is_that_of_the_action_tokens_alone(gamma, lam):
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1, 1]])
    rewards, values = tensor(2, 7), tensor(2, 7)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=lam)
    for row in range(2):
        keep = mask[row].bool()
        expected = reference_gae(rewards[row][keep].tolist(), values[row][keep].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[row][keep], expected, rtol=1e-12)
        np.testing.assert_allclose(returns[row][keep], np.array(expected) + values[row][keep].numpy(), rtol=1e-12)
        assert advantages[row][~keep].abs().sum() == 0
        assert returns[row][~keep].abs().sum() == 0


def test_gae_does_not_depend_on_what_stands_at_other_positions():
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    rewards, values = tensor(1, 5), tensor(1, 5)
    plain = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.9)
    poisoned = torch.where(mask.bool(), values, torch.tensor(math.nan, dtype=torch.float64))
    other = gae(torch.where(mask.bool(), rewards, 1e9), poisoned, mask, gamma=0.9, gae_lambda=0.9)
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a, b)


def test_score_lands_on_the_last_action_token_and_kl_on_each():
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    kl = torch.tensor([[0.1, 0.2, math.nan, 0.4, 9.0], [0.5, 9.0, 9.0, 9.0, 9.0]])
    got = token_rewards(torch.tensor([2.0, -1.0]), kl, mask, kl_coef=0.5)
    np.testing.assert_allclose(got, [[-0.05, -0.1, 0, 1.8, 0], [-1.25, 0, 0, 0, 0]], rtol=1e-6)


def test_a_score_without_an_action_token_is_refused():
    with pytest.raises(ValueError, match=r"trajectories \[1\] have no action token"):
        token_rewards(torch.zeros(2), torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]]), 0.1)


def test_whiten_over_action_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    advantages = tensor(2, 3)
    valid = advantages[mask.bool()].numpy()
    got = whiten(advantages, mask)
    np.testing.assert_allclose(got[mask.bool()], (valid - valid.mean()) / valid.std(), rtol=1e-9)
    assert got[~mask.bool()].abs().sum() == 0
    assert torch.isfinite(whiten(torch.full((2, 3), 5.0), mask)).all()


def test_k1_is_the_log_ratio_and_averages_to_the_kl():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    draws = RNG.choice(3, size=200_000, p=p)
    k1 = kl_k1(torch.tensor(np.log(p)[draws]), torch.tensor(np.log(q)[draws]))
    assert k1.mean().item() == pytest.approx(float((p * np.log(p / q)).sum()), abs=0.01)


def test_policy_loss_by_hand():
    old = torch.zeros(6)
    ratio = torch.tensor([1.1, 1.5, 0.5, 1.5, 0.5, 1.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 2.0])
    loss, clipped = policy_loss(ratio.log(), old, advantage, clip_low=0.2, clip_high=0.3)
    # Up with A > 0 stops at 1.3; down with A > 0 does not stop; up with A < 0 does not stop; down stops at 0.8.
    np.testing.assert_allclose(loss, [-1.1, -1.3, -0.5, 1.5, 0.8, -2.0], rtol=1e-6)
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_policy_gradient_agrees_with_finite_differences():
    old, advantages = tensor(4, 5), tensor(4, 5)
    start = (old + 0.1 * tensor(4, 5)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, clip_low=0.2, clip_high=0.2)[0], (start,), eps=1e-7
    )


def test_policy_gradient_at_the_old_policy_is_that_of_reinforce():
    old, advantages = tensor(3, 4), tensor(3, 4)
    start = old.clone().requires_grad_()
    policy_loss(start, old, advantages, clip_low=0.2, clip_high=0.2)[0].sum().backward()
    torch.testing.assert_close(start.grad, -advantages)


def test_value_loss_by_hand():
    values, old, returns = torch.tensor([1.0, 1.0, 0.3]), torch.tensor([0.0, 0.9, 0.0]), torch.tensor([2.0, 2.0, 0.0])
    loss, clipped = value_loss(values, old, returns, clip=0.2)
    # Bounded values: 0.2, 1.0, 0.2; the larger of both squares counts.
    np.testing.assert_allclose(loss, [0.5 * 1.8**2, 0.5 * 1.0, 0.5 * 0.09], rtol=1e-6)
    assert clipped.tolist() == [True, False, False]
