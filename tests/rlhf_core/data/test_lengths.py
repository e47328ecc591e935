import pytest

from rlhf_core.data.lengths import lengths_of


def test_quantiles_and_histogram_by_hand():
    """Bins are whole numbers, and fewer than 20 where the longest is shorter; 95% of the way from 1 to 4 is 3.85."""
    found = lengths_of([4, 1, 3, 2])
    assert (found.min, found.median, found.mean, found.max) == (1, 2.5, 2.5, 4)
    assert found.p95 == pytest.approx(3.85)
    assert (found.edges, found.counts) == ([0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 1])


def test_each_length_is_in_one_bin_of_a_long_histogram():
    found = lengths_of([0, 999, 500, 500])
    assert (len(found.counts), found.edges[0], found.edges[-1]) == (20, 0, 1000)
    assert [(low, count) for low, count in zip(found.edges, found.counts, strict=False) if count] == [
        (0, 1),
        (500, 2),
        (950, 1),
    ]
