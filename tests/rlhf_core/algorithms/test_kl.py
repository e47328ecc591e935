"""A policy over three tokens, so that means over draws are exact sums; gradients against finite differences."""

from itertools import product

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.kl import adapted_coefficient, kl_estimate, kl_loss

LOGITS = np.array([0.3, -1.2, 0.8])
OLD = np.array([0.5, 0.2, 0.3])
REF = np.array([0.2, 0.5, 0.3])


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def kl(p, q):
    return float((p * np.log(p / q)).sum())


def finite_difference(function, at, h=1e-6):
    steps = h * np.eye(len(at))
    return np.array([(function(at + step) - function(at - step)) / (2 * h) for step in steps])


def test_values_of_the_estimators():
    p, q = softmax(LOGITS), REF
    value = {
        name: kl_estimate(torch.tensor(np.log(p)), torch.tensor(np.log(q)), name).numpy() for name in ("k1", "k2", "k3")
    }
    d = np.log(p / q)
    np.testing.assert_allclose(value["k1"], d)
    np.testing.assert_allclose(value["k2"], d**2 / 2)
    np.testing.assert_allclose(value["k3"], q / p - 1 - np.log(q / p))
    for unbiased in ("k1", "k3"):
        assert (p * value[unbiased]).sum() == pytest.approx(kl(p, q), abs=1e-12)
    assert (value["k3"] >= 0).all()


def mean_gradient(estimator, drawn_from, unbiased):
    """The mean over all tokens, as often as `drawn_from` draws them, of the gradient with respect to the logits."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    old, ref = torch.tensor(np.log(drawn_from)), torch.tensor(np.log(REF))
    loss = kl_loss(logprobs, old, ref, estimator, unbiased_gradient=unbiased)
    (torch.tensor(drawn_from) * loss).sum().backward()
    return logits.grad.numpy()


REVERSE = finite_difference(lambda x: kl(softmax(x), REF), LOGITS)
FORWARD = finite_difference(lambda x: kl(REF, softmax(x)), LOGITS)


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", np.zeros(3)), ("k2", REVERSE), ("k3", FORWARD)])
def test_mean_gradient_of_each_estimator(estimator, gradient):
    np.testing.assert_allclose(mean_gradient(estimator, softmax(LOGITS), False), gradient, atol=1e-8)


@pytest.mark.parametrize("drawn_from", [softmax(LOGITS), OLD])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unbiased_gradient_is_that_of_the_kl_whoever_drew(estimator, drawn_from):
    np.testing.assert_allclose(mean_gradient(estimator, drawn_from, True), REVERSE, atol=1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unbiased_gradient_keeps_the_value(estimator):
    logprobs, old, ref = (torch.tensor(np.log(p)) for p in (softmax(LOGITS), OLD, REF))
    found = kl_loss(logprobs, old, ref, estimator, unbiased_gradient=True)
    torch.testing.assert_close(found, kl_estimate(logprobs, ref, estimator))


@pytest.mark.parametrize(("estimator", "seed"), list(product(["k1", "k2", "k3"], range(3))))
def test_each_token_has_the_gradient_of_its_own_value(estimator, seed):
    rng = np.random.default_rng(seed)
    logprobs = torch.tensor(rng.normal(size=(3, 4)), requires_grad=True)
    ref = torch.tensor(rng.normal(size=(3, 4)))
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, x, ref, estimator, unbiased_gradient=False), (logprobs,))


def test_a_token_that_the_policy_lost_gives_no_infinity():
    logprobs = torch.tensor([-120.0], requires_grad=True)
    value = kl_estimate(logprobs, torch.zeros(1), "k3")
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize(
    ("kl_now", "expected"),
    [(6.0, 0.2), (6.6, 0.2 * (1 + 0.1 * 0.1)), (60.0, 0.2 * 1.02), (0.1, 0.2 * 0.98), (5.4, 0.2 * (1 - 0.1 * 0.1))],
)
def test_the_coefficient_follows_the_target(kl_now, expected):
    """Ziegler et al. 2019 with target 6: the error is at most 0.2, its gain 0.1 = 1024 / 10240."""
    assert adapted_coefficient(0.2, kl_now, target=6.0, horizon=10240, samples=1024) == pytest.approx(expected)
