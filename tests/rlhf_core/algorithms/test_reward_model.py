"""Expected values: NumPy in extended precision from the papers' formulas, and finite differences."""

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.reward_model import centering_penalty, pairwise_log_exp_loss, pairwise_sigmoid_loss

RNG = np.random.default_rng(0)
CHOSEN, REJECTED, MARGIN = (torch.tensor(scale * RNG.normal(size=64)) for scale in (5.0, 5.0, 1.0))


def bradley_terry(difference: np.ndarray) -> np.ndarray:
    """-log(1 / (1 + exp(-d))), as it is written."""
    return -np.log(1 / (1 + np.exp(-difference.astype(np.longdouble))))


def test_sigmoid_loss_is_bradley_terry():
    difference = CHOSEN.numpy() - REJECTED.numpy()
    np.testing.assert_allclose(pairwise_sigmoid_loss(CHOSEN, REJECTED), bradley_terry(difference), rtol=0, atol=1e-10)


def test_margin_is_subtracted_inside_the_sigmoid():
    expected = bradley_terry(CHOSEN.numpy() - REJECTED.numpy() - MARGIN.numpy())
    np.testing.assert_allclose(pairwise_sigmoid_loss(CHOSEN, REJECTED, MARGIN), expected, rtol=0, atol=1e-10)


def test_log_exp_loss_as_it_is_written_and_beyond_where_that_overflows():
    expected = np.log(1 + np.exp((REJECTED - CHOSEN).numpy().astype(np.longdouble)))
    np.testing.assert_allclose(pairwise_log_exp_loss(CHOSEN, REJECTED), expected, rtol=0, atol=1e-10)
    # A library's softplus would give 30 here, as it does from 20 on.
    thirty = pairwise_log_exp_loss(torch.tensor([0.0]).double(), torch.tensor([21.0]).double()).item()
    assert thirty == pytest.approx(21.0 + np.exp(-21.0), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", [pairwise_sigmoid_loss, pairwise_log_exp_loss])
def test_differences_of_10000_stay_finite_with_the_right_gradient(loss, dtype):
    chosen = torch.tensor([-5000.0, 5000.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([5000.0, -5000.0], dtype=dtype)
    losses = loss(chosen, rejected)
    losses.sum().backward()
    exact = rejected.double() - chosen.detach().double()
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([exact[0].item(), 0.0])
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_difference_of_low_precision_scores_is_not_rounded():
    """256 - 1/128 is no bfloat16 number: subtracted in that dtype, the loss would be that of 256."""
    chosen, rejected = torch.tensor([1 / 128], dtype=torch.bfloat16), torch.tensor([256.0], dtype=torch.bfloat16)
    for loss in (pairwise_sigmoid_loss, pairwise_log_exp_loss):
        assert loss(chosen, rejected).item() == 256 - 1 / 128
    assert centering_penalty(chosen, rejected).item() == pytest.approx((256 + 1 / 128) ** 2, rel=1e-7)


def test_centering_penalty_is_the_square_of_the_sum():
    expected = (CHOSEN.numpy() + REJECTED.numpy()) ** 2
    np.testing.assert_allclose(centering_penalty(CHOSEN, REJECTED), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", [pairwise_sigmoid_loss, pairwise_log_exp_loss, centering_penalty])
def test_gradients_agree_with_finite_differences(loss):
    assert torch.autograd.gradcheck(loss, [side.clone().requires_grad_() for side in (CHOSEN, REJECTED)])


def test_gradient_with_margin_agrees_with_finite_differences():
    chosen, rejected = (side.clone().requires_grad_() for side in (CHOSEN, REJECTED))
    assert torch.autograd.gradcheck(lambda c, r: pairwise_sigmoid_loss(c, r, MARGIN), (chosen, rejected))
