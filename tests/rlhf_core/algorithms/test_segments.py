"""Expected values are worked out by hand, or by a loop over the samples."""

import math

import numpy as np
import torch

from rlhf_core.algorithms.likelihood import weighted_logprobs
from rlhf_core.algorithms.segments import last_in_segment, number_in_segment, segment_sums

NAN = math.nan
# Sample 1 and then 0 in the first row, 2 behind fill in the second: numbers and places are in any order.
SEGMENTS = torch.tensor([[1, 1, 1, 0, 0, -1], [-1, 2, 2, -1, -1, -1]])
VALUES = torch.tensor([[1.0, 2.0, 3.0, 10.0, 20.0, NAN], [NAN, 100.0, 200.0, NAN, NAN, NAN]])


def test_sums_are_those_of_each_sample_and_fill_enters_neither_them_nor_the_gradient():
    values = VALUES.clone().requires_grad_()
    sums = segment_sums(values, SEGMENTS, 4)
    assert sums.tolist() == [30.0, 6.0, 300.0, 0.0]
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[2.0, 2.0, 2.0, 1.0, 1.0, 0.0], [0.0, 3.0, 3.0, 0.0, 0.0, 0.0]]


def test_sum_of_a_long_response_in_float32_is_exact_in_any_order():
    logprobs = -torch.rand(1, 20_000, generator=torch.Generator().manual_seed(0)) * 10
    segments = torch.zeros(1, 20_000, dtype=torch.long)
    exact = math.fsum(logprobs[0].tolist())
    for order in (torch.arange(20_000), torch.randperm(20_000, generator=torch.Generator().manual_seed(1))):
        assert abs(segment_sums(logprobs[:, order], segments, 1).item() - exact) < 1e-8


def test_last_value_of_each_sample_and_its_gradient():
    values = VALUES.clone().requires_grad_()
    last = last_in_segment(values, SEGMENTS, 4)
    assert last.tolist()[:3] == [20.0, 3.0, 200.0]
    assert math.isnan(last[3].item())
    last[:3].sum().backward()
    assert values.grad is not None
    assert values.grad.nonzero().tolist() == [[0, 2], [0, 4], [1, 2]]


def test_last_value_does_not_depend_on_row_mates():
    alone = last_in_segment(VALUES[1:, 1:3], torch.tensor([[0, 0]]), 1)
    others = torch.where(SEGMENTS == 2, VALUES, -7.0)
    assert alone.item() == last_in_segment(others, SEGMENTS, 3)[2].item() == 200.0


def test_targets_are_numbered_within_their_sample():
    targets = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]]).bool()
    assert number_in_segment(targets, SEGMENTS, 3).tolist() == [[1, 0, 2, 1, 2, 0], [0, 0, 1, 0, 0, 0]]


def test_numbers_against_a_loop_over_random_samples():
    rng = np.random.default_rng(0)
    segments = torch.full((4, 40), -1)
    numbers = rng.permutation(12)
    for place, number in enumerate(numbers):
        row, slot = divmod(place, 3)
        start = slot * 13 + int(rng.integers(3))
        segments[row, start : start + int(rng.integers(1, 10))] = int(number)
    targets = torch.tensor(rng.random((4, 40)) < 0.5)
    expected = torch.zeros(4, 40, dtype=torch.long)
    for number in range(12):
        places = ((segments == number) & targets).nonzero().tolist()
        for order, (row, column) in enumerate(places, start=1):
            expected[row, column] = order
    assert torch.equal(number_in_segment(targets, segments, 12), expected)
    assert expected.max() > 3


def test_weighted_logprobs_by_hand():
    logprobs = torch.tensor([[-1.0, NAN, -3.0]], requires_grad=True)
    weighted = weighted_logprobs(logprobs, torch.tensor([[0.5, 0.0, 2.0]]))
    assert weighted.tolist() == [[-0.5, 0.0, -6.0]]
    weighted.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.5, 0.0, 2.0]]
    assert torch.isnan(weighted_logprobs(logprobs, torch.ones(1, 3))).any()
