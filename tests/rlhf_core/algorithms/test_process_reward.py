"""Expected values: NumPy from the formulas, and finite differences."""

import math

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.process_reward import hard_step_loss, right_probability, soft_step_loss

RNG = np.random.default_rng(0)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_hard_loss_is_minus_log_of_the_labels_share(tokens):
    logits, labels = 3 * RNG.normal(size=(20, tokens)), RNG.integers(tokens, size=20)
    expected = [-math.log(softmax(row)[label]) for row, label in zip(logits, labels, strict=True)]
    got = hard_step_loss(torch.tensor(logits), torch.tensor(labels))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10)


def test_soft_loss_is_the_cross_entropy_of_a_coin():
    logits, labels = 3 * RNG.normal(size=(20, 2)), RNG.random(20)
    # With two tokens, P(right) is the sigmoid of the difference of their logits.
    right = 1 / (1 + np.exp(logits[:, 1] - logits[:, 0]))
    expected = -(labels * np.log(right) + (1 - labels) * np.log(1 - right))
    np.testing.assert_allclose(soft_step_loss(torch.tensor(logits), torch.tensor(labels)), expected, rtol=0, atol=1e-10)


def test_a_certain_soft_label_is_a_hard_one():
    logits = torch.tensor(RNG.normal(size=(4, 2)))
    wrong = torch.tensor([0, 1, 1, 0])
    np.testing.assert_allclose(soft_step_loss(logits, 1.0 - wrong), hard_step_loss(logits, wrong), rtol=0, atol=1e-12)


def test_score_of_a_step_is_the_share_of_the_first_token():
    logits = RNG.normal(size=(2, 3, 4))
    np.testing.assert_allclose(right_probability(torch.tensor(logits)), softmax(logits)[..., 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_logits_give_float32_losses_that_stay_finite(dtype):
    logits = torch.tensor([[10_000.0, -10_000.0]], dtype=dtype)
    exact = (logits[0, 0].double() - logits[0, 1].double()).item()
    hard, soft = hard_step_loss(logits, torch.tensor([1])), soft_step_loss(logits, torch.tensor([0.25]))
    assert hard.dtype == soft.dtype == torch.float32
    assert hard.item() == pytest.approx(exact)
    assert soft.item() == pytest.approx(0.75 * exact)


def test_gradients_agree_with_finite_differences():
    logits = torch.tensor(RNG.normal(size=(5, 2)), requires_grad=True)
    hard, soft = torch.tensor([0, 1, 1, 0, 1]), torch.tensor(RNG.random(5))
    assert torch.autograd.gradcheck(lambda x: hard_step_loss(x, hard), (logits,))
    assert torch.autograd.gradcheck(lambda x: soft_step_loss(x, soft), (logits,))
