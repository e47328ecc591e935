"""DPO, cDPO, IPO and KTO: NumPy from the papers' formulas, values by hand, and finite differences."""

import math

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.kto import kto_loss
from rlhf_core.algorithms.preference import dpo_loss, ipo_loss

RNG = np.random.default_rng(0)
CHOSEN, REJECTED = (torch.tensor(10 * RNG.normal(size=32)) for _ in range(2))
DESIRABLE = torch.tensor(RNG.random(32) < 0.5)
KTO = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.75}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_dpo_and_its_label_smoothing(smoothing):
    h = CHOSEN.numpy() - REJECTED.numpy()
    expected = -(1 - smoothing) * np.log(sigmoid(0.3 * h)) - smoothing * np.log(sigmoid(-0.3 * h))
    got = dpo_loss(CHOSEN, REJECTED, beta=0.3, label_smoothing=smoothing)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)


def test_dpo_is_finite_far_from_the_reference():
    far = torch.tensor([-1e5, 1e5])
    assert dpo_loss(far, -far, beta=1.0, label_smoothing=0.25).tolist() == pytest.approx([1.5e5, 5e4])


def test_smoothed_dpo_is_least_where_the_model_holds_the_label_as_likely_as_it_is():
    """At sigmoid(beta * h) = 1 - e (Mitchell 2023)."""
    h = torch.tensor([math.log(0.8 / 0.2) / 0.5], dtype=torch.float64, requires_grad=True)
    dpo_loss(h, torch.zeros(1), beta=0.5, label_smoothing=0.2).sum().backward()
    assert h.grad is not None
    assert abs(h.grad.item()) < 1e-12


def test_ipo_pulls_the_difference_to_a_half_of_1_over_beta():
    expected = (CHOSEN.numpy() - REJECTED.numpy() - 2.5) ** 2
    np.testing.assert_allclose(ipo_loss(CHOSEN, REJECTED, beta=0.2), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kl", [0.0, 1.7])
def test_kto_is_one_minus_the_value_of_each_response(kl):
    z = 0.2 * (CHOSEN.numpy() - kl)
    expected = np.where(DESIRABLE, 1.5 * (1 - sigmoid(z)), 0.75 * (1 - sigmoid(-z)))
    got = kto_loss(CHOSEN, DESIRABLE, torch.tensor(kl, dtype=torch.float64), **KTO)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)


def test_a_negative_kl_estimate_counts_as_0():
    negative, none = (kto_loss(CHOSEN, DESIRABLE, torch.tensor(kl), **KTO) for kl in (-3.0, 0.0))
    assert torch.equal(negative, none)


def test_no_gradient_flows_into_the_kl_estimate():
    log_ratios, kl = CHOSEN.clone().requires_grad_(), torch.tensor(1.0, requires_grad=True)
    kto_loss(log_ratios, DESIRABLE, kl, **KTO).sum().backward()
    assert log_ratios.grad is not None
    assert kl.grad is None


def test_kto_keeps_its_digits_for_a_response_far_above_the_reference():
    """1 - sigmoid(50) is 0 in float32, and sigmoid(-50) is not."""
    loss = kto_loss(torch.tensor([50.0]), torch.tensor([True]), torch.tensor(0.0), **{**KTO, "beta": 1.0})
    assert loss.item() == pytest.approx(1.5 * math.exp(-50), rel=1e-5, abs=0)


def test_gradients_agree_with_finite_differences():
    sides = [side.clone().requires_grad_() for side in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(lambda c, r: dpo_loss(c, r, beta=0.1, label_smoothing=0.2), sides)
    assert torch.autograd.gradcheck(lambda c, r: ipo_loss(c, r, beta=0.1), sides)
    assert torch.autograd.gradcheck(lambda r: kto_loss(r, DESIRABLE, torch.tensor(0.5), **KTO), sides[:1])
