import numpy as np
import pytest
import torch

from rlhf_core.algorithms.pass_at_k import majority, pass_at_k
from rlhf_core.algorithms.shaping import RunningMoments, overlong_penalty, truncation_penalised

RNG = np.random.default_rng(0)


def test_overlong_penalty_falls_over_the_buffer():
    """DAPO's own figures: at most 20480 tokens, a buffer of 4096."""
    lengths = torch.tensor([10, 16384, 18432, 20480])
    got = overlong_penalty(lengths, max_len=20480, buffer=4096, factor=1.0)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0]
    assert overlong_penalty(lengths, max_len=20480, buffer=4096, factor=0.5).tolist() == [0.0, 0.0, -0.25, -0.5]


@pytest.mark.parametrize(
    ("coef", "expected"), [(None, [2.0, 2.0]), (0.5, [2.0, 1.0]), (0.0, [2.0, 0.0]), (-1.0, [2, -1])]
)
def test_truncated_responses_are_penalised(coef, expected):
    assert truncation_penalised(torch.tensor([2.0, 2.0]), torch.tensor([False, True]), coef).tolist() == expected


def test_running_moments_are_those_of_all_scores_so_far():
    batches = [RNG.normal(3.0, size=n).tolist() for n in (1, 7, 0, 4)]
    moments = RunningMoments()
    for batch in batches:
        moments = moments.updated(batch)
    everything = np.concatenate(batches)
    assert moments.count == 12
    assert moments.mean == pytest.approx(everything.mean(), rel=1e-12)
    assert moments.std == pytest.approx(everything.std(), rel=1e-12)
    scores = torch.tensor([1.0, 5.0], dtype=torch.float64)
    expected = (scores.numpy() - everything.mean()) / everything.std()
    np.testing.assert_allclose(moments.normalised(scores), expected, rtol=1e-9)


def test_equal_scores_normalise_to_nothing():
    moments = RunningMoments().updated([0.1, 0.1, 0.1])
    assert moments.normalised(torch.tensor([0.1], dtype=torch.float64)).abs().max() < 1e-6


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (4, 1, 4), (10, 3, 5)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c, k):
    from itertools import combinations

    right = [1] * c + [0] * (n - c)
    expected = np.mean([max(chosen) for chosen in combinations(right, k)])
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_more_than_was_sampled_is_refused():
    with pytest.raises(ValueError, match="pass@5 of 4 samples with 2 right"):
        pass_at_k(4, 2, 5)


def test_the_majority_decides_and_of_equals_the_earliest():
    assert majority(["7", "8", "8"], [1.0, 0.0, 0.0]) == 0.0
    assert majority(["7", "8"], [1.0, 0.0]) == 1.0
