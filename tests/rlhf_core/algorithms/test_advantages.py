"""Expected values come from NumPy loops written from the papers' formulas."""

import math

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.advantages import gae, normalise, returns_to_go, token_rewards
from rlhf_core.algorithms.groups import group_centred, group_normalised, group_sizes, group_spread, leave_one_out
from rlhf_core.algorithms.masked import masked_sum
from rlhf_core.algorithms.step_rewards import baselined_steps, placed_steps, step_values

RNG = np.random.default_rng(0)
MASK = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 1, 1, 1]])


def tensor(*shape):
    return torch.tensor(RNG.normal(size=shape), dtype=torch.float64)


def filled(values, mask, value):
    """`values` with something else at the positions that are not to count."""
    return torch.where(mask.bool(), values, torch.tensor(value, dtype=values.dtype))


def test_masked_reductions_ignore_nan_at_masked_places_and_show_it_at_valid_ones():
    values = torch.tensor([[1.0, math.nan, 3.0]], requires_grad=True)
    total = masked_sum(values, torch.tensor([[1, 0, 1]]))
    total.backward()
    assert total.item() == 4.0
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 1.0]]
    assert math.isnan(masked_sum(values, torch.tensor([[1, 1, 1]])).item())


def reference_gae(rewards, values, gamma, lam, final=0.0):
    """A_t = sum over l of (gamma * lambda)^l * delta_{t+l}, Schulman et al. 2016, eq. 16, written out."""
    steps = len(rewards)
    nexts = [*values[1:], final]
    deltas = [rewards[t] + gamma * nexts[t] - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(steps - t)) for t in range(steps)]


@pytest.mark.parametrize("final", [None, [0.0, 2.5]])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_gae_is_that_of_the_action_tokens_alone(gamma, lam, final):
    rewards, values = tensor(2, 7), tensor(2, 7)
    after = None if final is None else torch.tensor(final)
    advantages, returns = gae(rewards, values, MASK, gamma=gamma, gae_lambda=lam, final_values=after)
    for row in range(2):
        keep = MASK[row].bool()
        last = 0.0 if final is None else final[row]
        expected = reference_gae(rewards[row][keep].tolist(), values[row][keep].tolist(), gamma, lam, last)
        np.testing.assert_allclose(advantages[row][keep], expected, rtol=1e-12)
        np.testing.assert_allclose(returns[row][keep], np.array(expected) + values[row][keep].numpy(), rtol=1e-12)
        assert advantages[row][~keep].abs().sum() == 0
        assert returns[row][~keep].abs().sum() == 0


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_discount_action_tokens_alone(gamma):
    rewards = tensor(2, 7)
    returns = returns_to_go(filled(rewards, MASK, math.nan), MASK, gamma=gamma)
    for row in range(2):
        keep = MASK[row].bool()
        own = rewards[row][keep].tolist()
        expected = [sum(gamma ** (k - t) * own[k] for k in range(t, len(own))) for t in range(len(own))]
        np.testing.assert_allclose(returns[row][keep], expected, rtol=1e-12)
        assert returns[row][~keep].abs().sum() == 0


@pytest.mark.parametrize("garbage", [math.nan, 1e9])
def test_nothing_depends_on_what_stands_at_other_positions(garbage):
    rewards, values = tensor(2, 7), tensor(2, 7)

    def computed(rewards, values):
        advantages, returns = gae(rewards, values, MASK, gamma=0.9, gae_lambda=0.9)
        to_go = returns_to_go(rewards, MASK, gamma=0.9)
        given = token_rewards(torch.ones(2), rewards, MASK, 0.5)
        return (
            advantages,
            returns,
            to_go,
            given,
            *(normalise(values, MASK, how) for how in ("none", "mean", "mean_std")),
        )

    for a, b in zip(
        computed(rewards, values),
        computed(filled(rewards, MASK, garbage), filled(values, MASK, garbage)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_score_lands_on_the_last_action_token_and_kl_on_each():
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    kl = torch.tensor([[0.1, 0.2, math.nan, 0.4, 9.0], [0.5, 9.0, 9.0, 9.0, 9.0]])
    got = token_rewards(torch.tensor([2.0, -1.0]), kl, mask, kl_coef=0.5)
    np.testing.assert_allclose(got, [[-0.05, -0.1, 0, 1.8, 0], [-1.25, 0, 0, 0, 0]], rtol=1e-6)


def test_a_score_without_an_action_token_is_refused():
    with pytest.raises(ValueError, match=r"trajectories \[1\] have no action token"):
        token_rewards(torch.zeros(2), torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]]), 0.1)


def test_normalisation_over_action_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    advantages = tensor(2, 3)
    valid = advantages[mask.bool()].numpy()
    expected = {"none": valid, "mean": valid - valid.mean(), "mean_std": (valid - valid.mean()) / valid.std()}
    for how, wanted in expected.items():
        got = normalise(advantages, mask, how)
        np.testing.assert_allclose(got[mask.bool()], wanted, rtol=1e-9)
        assert got[~mask.bool()].abs().sum() == 0


@pytest.mark.parametrize("how", ["mean", "mean_std"])
@pytest.mark.parametrize("value", [5.0, 0.1, -7.3])
def test_equal_advantages_normalise_to_nothing(value, how):
    """In float32 the mean of 700 times 0.1 is not 0.1, and what is left would be divided by 1e-4."""
    mask = torch.ones(70, 10)
    assert normalise(torch.full((70, 10), value), mask, how).abs().max() < 1e-9


# -- groups ------------------------------------------------------------------------------------------------------------

GROUPS = [7, 3, 7, 3, 7, 5, 3]  # in no order, and one alone
SCORES = [1.0, 0.5, -2.0, 0.25, 4.0, 3.0, 0.0]
ESTIMATORS = {
    "centred": (group_centred, lambda own, others: own - np.mean([own, *others])),
    "rloo": (leave_one_out, lambda own, others: own - np.mean(others)),
    "normalised": (
        group_normalised,
        lambda own, others: (own - np.mean([own, *others])) / (np.std([own, *others], ddof=1) + 1e-6),
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_baselines_are_those_of_the_group(name):
    function, formula = ESTIMATORS[name]
    got = function(torch.tensor(SCORES), torch.tensor(GROUPS))
    for i, (score, group) in enumerate(zip(SCORES, GROUPS, strict=True)):
        others = [s for j, (s, g) in enumerate(zip(SCORES, GROUPS, strict=True)) if g == group and j != i]
        assert got[i].item() == pytest.approx(formula(score, others) if others else 0.0, rel=1e-6), i


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("score", [0.1, 1e9, -3.3, 0.0])
def test_equal_scores_leave_nothing(name, score):
    for size in (1, 2, 3, 7):
        got = ESTIMATORS[name][0](torch.full((size,), score), torch.zeros(size, dtype=torch.long))
        assert got.tolist() == [0.0] * size


def test_normalised_scores_are_bounded():
    one_right = torch.zeros(64)
    one_right[5] = 1e-3
    got = group_normalised(one_right, torch.zeros(64, dtype=torch.long))
    assert got.abs().max() <= 63 / 8


def test_spread_and_sizes_by_group():
    assert group_spread(torch.tensor(SCORES), torch.tensor(GROUPS)).tolist() == [0.5, 0.0, 6.0]
    assert group_sizes(torch.tensor(GROUPS)).tolist() == [3, 1, 3]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_step_values_by_hand():
    assert step_values([0.9, 0.5, 0.75], "sum") == [0.9, 0.5, 0.75]
    assert step_values([0.875, 0.5, 0.75], "progress") == [0.875, -0.375, 0.25]
    assert step_values([], "progress") == []


def test_steps_share_the_baseline_of_their_group():
    values, groups = [[1.0, 2.0], [6.0], [], [5.0, 7.0]], [4, 4, 4, 2]
    assert baselined_steps(values, groups, "none") == values
    assert baselined_steps(values, groups, "centred") == [[-2.0, -1.0], [3.0], [], [-1.0, 1.0]]
    std = np.std([1.0, 2.0, 6.0], ddof=1) + 1e-6
    normalised = baselined_steps(values, groups, "normalised")
    np.testing.assert_allclose(normalised[0] + normalised[1], np.array([-2.0, -1.0, 3.0]) / std)
    assert baselined_steps([[], []], [0, 1], "centred") == [[], []]


def test_steps_lie_on_the_last_action_token_before_their_end():
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    placed = placed_steps([[0.5, 0.25], [1.0, 2.0]], [[2, 3], [1, 1]], mask)
    assert placed.tolist() == [[0.0, 0.5, 0.0, 0.25], [0.0, 3.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match="trajectory 0: a step ends at token 0, before the first action token"):
        placed_steps([[1.0]], [[0]], torch.tensor([[0, 1]]))
