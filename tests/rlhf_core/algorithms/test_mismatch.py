"""Each correction against a loop over tokens in NumPy."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.mismatch import correction, mismatch_metrics

RNG = np.random.default_rng(0)
MASK = np.array([[1, 1, 0, 1, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=bool)
TRAINER = np.log(RNG.uniform(0.05, 0.95, MASK.shape))
SAMPLER = np.minimum(TRAINER + RNG.normal(0, [[0.05], [0.5], [0.2]], MASK.shape), -1e-3)
BANDS = {"ratio": (0.8, 1.2), "binary_kl": (0.0, 0.01), "tv": (0.0, 0.05)}


def statistic(name, trainer, sampler):
    """Of one token; `ratio` as its logarithm, whose mean over a sequence is exponentiated."""
    p, q = math.exp(sampler), math.exp(trainer)
    if name == "ratio":
        return trainer - sampler
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if name == "binary_kl" else abs(p - q)


def expected(level, mode, name, low, high):
    weights, cut = np.zeros(MASK.shape), np.zeros(MASK.shape, dtype=bool)
    for row, own in enumerate(np.flatnonzero(mask) for mask in MASK):
        z = [TRAINER[row, t] - SAMPLER[row, t] for t in own]
        tested = [statistic(name, TRAINER[row, t], SAMPLER[row, t]) for t in own]
        for number, t in enumerate(own):
            w = math.exp(z[number])
            if mode == "clip":
                w = math.exp(sum(z)) if level == "sequence" else w
                weights[row, t] = min(max(w, low), high)
                cut[row, t] = not low <= w <= high
                continue
            value = tested[number] if level == "token" else float(np.mean(tested))
            value = math.exp(value) if name == "ratio" else value
            cut[row, t] = not low <= value <= high
            weights[row, t] = 0.0 if cut[row, t] else w
    return weights, cut


CASES = [*product(["token", "sequence"], ["mask"], BANDS), *product(["token", "sequence"], ["clip"], ["ratio"])]


@pytest.mark.parametrize(("level", "mode", "name"), CASES)
@pytest.mark.parametrize("garbage", [math.nan, 1e9])
def test_corrections_follow_their_definitions(level, mode, name, garbage):
    low, high = (0.9, 1.05) if level == "sequence" and name == "ratio" else BANDS[name]
    dirty = [torch.tensor(np.where(MASK, values, garbage)) for values in (TRAINER, SAMPLER)]
    made = correction(*dirty, torch.tensor(MASK), level=level, mode=mode, statistic=name, low=low, high=high)
    weights, cut = expected(level, mode, name, low, high)
    np.testing.assert_allclose(made.weights, weights, rtol=1e-9)
    assert made.cut.tolist() == cut.tolist()
    assert 0 < cut.sum() < MASK.sum()


def test_off_weighs_every_action_token_with_one():
    made = correction(torch.tensor(TRAINER), torch.tensor(SAMPLER), torch.tensor(MASK), level="off")
    assert made.weights.tolist() == MASK.astype(float).tolist()
    assert not made.cut.any()


def test_a_token_without_a_log_prob_of_the_sampler_has_ratio_one_and_no_part_in_means():
    sampler = torch.tensor(SAMPLER)
    sampler[0, 1] = math.nan
    trainer, mask = torch.tensor(TRAINER), torch.tensor(MASK)
    for level, mode in product(["token", "sequence"], ["mask", "clip"]):
        made = correction(trainer, sampler, mask, level=level, mode=mode, low=0.5, high=2.0)
        assert torch.isfinite(made.weights).all()
    assert correction(trainer, sampler, mask, level="token", mode="mask", low=0.5, high=2.0).weights[0, 1] == 1
    without = mask.clone()
    without[0, 1] = False
    with_nan = correction(trainer, sampler, mask, level="sequence", mode="clip", low=0.5, high=2.0)
    left_out = correction(trainer, sampler, without, level="sequence", mode="clip", low=0.5, high=2.0)
    assert with_nan.weights[0, 0] == left_out.weights[0, 0]
    assert with_nan.known.sum() == MASK.sum() - 1


def test_metrics():
    trainer, sampler, mask = torch.tensor(TRAINER), torch.tensor(SAMPLER), torch.tensor(MASK)
    made = correction(trainer, sampler, mask, level="token", mode="mask", low=0.8, high=1.2)
    z = (TRAINER - SAMPLER)[MASK]
    metrics = mismatch_metrics(trainer, sampler, mask, made)
    assert metrics["mismatch/kl"] == pytest.approx((np.exp(z) - 1 - z).mean())
    assert metrics["mismatch/log_ratio"] == pytest.approx(-z.mean())
    assert metrics["mismatch/cut"] == pytest.approx(((np.exp(z) < 0.8) | (np.exp(z) > 1.2)).mean())
    unknown = torch.full_like(sampler, math.nan)
    off = correction(trainer, unknown, mask, level="off")
    assert mismatch_metrics(trainer, unknown, mask, off) == {"mismatch/cut": 0.0}
