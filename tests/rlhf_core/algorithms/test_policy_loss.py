"""Expected values come from NumPy loops written from the papers' formulas, gradients from finite differences."""

import math

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.policy_loss import (
    cispo_loss,
    clip_loss,
    denominator,
    sequence_ratio,
    token_ratio,
    token_weights,
)
from rlhf_core.algorithms.value_loss import value_loss

RNG = np.random.default_rng(0)


def tensor(*shape):
    return torch.tensor(RNG.normal(size=shape), dtype=torch.float64)


def test_clipping_by_hand():
    ratio = torch.tensor([1.1, 1.5, 0.5, 1.5, 0.5, 1.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 2.0])
    loss, clipped = clip_loss(ratio, advantage, clip_low=0.2, clip_high=0.3)
    # Up with A > 0 stops at 1.3; down with A > 0 does not stop; up with A < 0 does not stop; down stops at 0.8.
    np.testing.assert_allclose(loss, [-1.1, -1.3, -0.5, 1.5, 0.8, -2.0], rtol=1e-6)
    assert clipped.tolist() == [False, True, False, False, True, False]


def test_dual_clip_bounds_a_large_ratio_of_a_bad_token_alone():
    ratio = torch.tensor([9.0, 9.0, 2.0, 0.1])
    advantage = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    loss, clipped = clip_loss(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    np.testing.assert_allclose(loss, [3.0, -1.2, 2.0, 0.8], rtol=1e-6)
    assert clipped.tolist() == [True, True, False, True]


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_gradient_of_clipping_agrees_with_finite_differences(dual_clip):
    old, advantages = tensor(4, 5), tensor(4, 5)
    start = (old + 0.4 * tensor(4, 5)).requires_grad_()

    def loss(x):
        return clip_loss(token_ratio(x, old), advantages, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)[0]

    assert loss(start).detach().abs().sum() > 0
    assert torch.autograd.gradcheck(loss, (start,), eps=1e-7)


@pytest.mark.parametrize("form", ["clip", "cispo"])
def test_gradient_at_the_old_policy_is_that_of_reinforce(form):
    old, advantages = tensor(3, 4), tensor(3, 4)
    start = old.clone().requires_grad_()
    ratio = token_ratio(start, old)
    if form == "clip":
        loss, _ = clip_loss(ratio, advantages, clip_low=0.2, clip_high=0.2)
    else:
        loss, _ = cispo_loss(start, ratio, advantages, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    torch.testing.assert_close(start.grad, -advantages)


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_each_token():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([1.1, 7.0, 0.05], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    loss, clipped = cispo_loss(logprobs, ratio, advantages, clip_low=0.9, clip_high=4.0)
    loss.sum().backward()
    weight = np.array([1.1, 5.0, 0.1])
    np.testing.assert_allclose(loss.detach(), -weight * advantages.numpy() * logprobs.detach().numpy())
    np.testing.assert_allclose(logprobs.grad, -weight * advantages.numpy())
    assert clipped.tolist() == [False, True, True]


def test_ratios_far_away_are_finite():
    far = torch.tensor([500.0, -500.0], requires_grad=True)
    ratio = token_ratio(far, torch.zeros(2))
    assert torch.isfinite(ratio).all()


# Two samples in the first row, one in the second; of the first sample the second token is none of the policy's.
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
MASK = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 1, 1, 1, 0]]).bool()
MEMBERS = [[(0, 0), (0, 2)], [(0, 4)], [(1, 1), (1, 2), (1, 3), (1, 4)]]


@pytest.mark.parametrize("garbage", [math.nan, 1e9])
def test_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens(garbage):
    logprobs, old = tensor(2, 6), tensor(2, 6)
    dirty = [torch.where(MASK, x, torch.tensor(garbage, dtype=torch.float64)) for x in (logprobs, old)]
    ratio = sequence_ratio(*dirty, MASK, SEGMENTS, 3)
    for places in MEMBERS:
        product = math.prod(math.exp(float(logprobs[place] - old[place])) for place in places)
        for place in places:
            assert ratio[place].item() == pytest.approx(product ** (1 / len(places)), rel=1e-12)
    assert bool((ratio[~MASK] == 1).all())


def test_gradient_of_gspo_agrees_with_finite_differences_and_its_paper():
    """Zheng et al. 2025: the mean over sequences of min(s A, clip(s) A), one ratio and one advantage a sequence."""
    old, rewards = tensor(2, 6), [1.5, -0.7, 0.4]
    advantages = torch.zeros(2, 6, dtype=torch.float64)
    for places, reward in zip(MEMBERS, rewards, strict=True):
        for place in places:
            advantages[place] = reward
    start = (old + 0.3 * tensor(2, 6)).requires_grad_()

    def ours(x):
        ratio = sequence_ratio(x, old, MASK, SEGMENTS, 3)
        losses, _ = clip_loss(ratio, advantages, clip_low=0.2, clip_high=0.2)
        weights = token_weights(MASK, SEGMENTS, 3, "sequence_mean").double()
        return (losses * weights).sum() / denominator(MASK, SEGMENTS, 3, "sequence_mean", 1)

    expected = []
    for places, reward in zip(MEMBERS, rewards, strict=True):
        s = math.exp(np.mean([(start[p] - old[p]).item() for p in places]))
        expected.append(min(s * reward, min(max(s, 0.8), 1.2) * reward))
    assert ours(start).item() == pytest.approx(-np.mean(expected), rel=1e-7)
    assert torch.autograd.gradcheck(ours, (start,), eps=1e-7, atol=1e-6)


def test_aggregations():
    losses = tensor(2, 6)
    by_sample = [[float(losses[place]) for place in places] for places in MEMBERS]
    expected = {
        "token_mean": np.mean([value for sample in by_sample for value in sample]),
        "sequence_mean": np.mean([np.mean(sample) for sample in by_sample]),
        "constant": np.mean([np.sum(sample) / 50 for sample in by_sample]),
    }
    for how, wanted in expected.items():
        weights = token_weights(MASK, SEGMENTS, 3, how)
        assert weights[~MASK].abs().sum() == 0
        found = float((losses * weights).sum()) / denominator(MASK, SEGMENTS, 3, how, 50)
        assert found == pytest.approx(wanted, rel=1e-6), how


def test_a_sample_without_an_action_token_counts_in_no_mean():
    mask = MASK & (SEGMENTS != 1)
    assert denominator(mask, SEGMENTS, 3, "sequence_mean", 1) == 2
    assert denominator(mask, SEGMENTS, 3, "constant", 10) == 20
    assert bool(torch.isfinite(token_weights(mask, SEGMENTS, 3, "sequence_mean")).all())


def test_value_loss_by_hand():
    values, old, returns = torch.tensor([1.0, 1.0, 0.3]), torch.tensor([0.0, 0.9, 0.0]), torch.tensor([2.0, 2.0, 0.0])
    loss, clipped = value_loss(values, old, returns, clip=0.2)
    # Bounded values: 0.2, 1.0, 0.2; the larger of both squares counts.
    np.testing.assert_allclose(loss, [0.5 * 1.8**2, 0.5 * 1.0, 0.5 * 0.09], rtol=1e-6)
    assert clipped.tolist() == [True, False, False]
    plain, none = value_loss(values, old, returns, clip=None)
    np.testing.assert_allclose(plain, [0.5, 0.5, 0.5 * 0.09], rtol=1e-6)
    assert not none.any()


def test_gradient_of_the_value_loss_agrees_with_finite_differences():
    old, returns = tensor(3, 4), tensor(3, 4)
    values = (old + 0.3 * tensor(3, 4)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, clip=0.2)[0], (values,), eps=1e-7)
