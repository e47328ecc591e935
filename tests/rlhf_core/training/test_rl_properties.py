"""Every algorithm on random rollouts: nothing but the trajectories themselves enters a step's loss and gradient.

The policy is a table of bigram logits in float64, so that a whole step is exact and takes milliseconds.
"""

import dataclasses
import math
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlhf_core.config.algorithm import PRESETS, AlgorithmSettings, Estimator
from rlhf_core.data.layout import Layout
from rlhf_core.training.experience import Experience, Graded, Scored, build_experience
from rlhf_core.training.rl_batches import experience_batches
from rlhf_core.training.rl_objectives import PolicyObjective, ValueObjective
from rlhf_core.training.rl_state import RlState

VOCABULARY, LONGEST = 11, 9
SEEDS = range(2)

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{preset: {"preset": preset} for preset in PRESETS},
    **{
        f"{estimator}-{loss}-{aggregation}": {"estimator": estimator, "loss": loss, "aggregation": aggregation}
        for estimator, loss, aggregation in product(
            get_args(Estimator), ("clip", "gspo", "cispo"), ("token_mean", "sequence_mean", "constant")
        )
    },
    **{
        f"kl-{estimator}-{place}": {
            "kl": {"estimator": estimator, "place": place, "unbiased_gradient": place == "loss"}
        }
        for estimator, place in product(("k1", "k2", "k3"), ("reward", "loss"))
    },
    **{
        f"mismatch-{level}-{mode}-{statistic}": {
            "mismatch": {"level": level, "mode": mode, "statistic": statistic, "low": 0.0, "high": 0.9}
        }
        for level, (mode, statistic) in product(
            ("token", "sequence"), (("mask", "ratio"), ("clip", "ratio"), ("mask", "binary_kl"), ("mask", "tv"))
        )
    },
    "entropy": {"entropy_coef": 0.1, "dual_clip": 3.0},
    "steps-sum": {"steps": {"coef": 0.5, "form": "sum"}, "estimator": "group_norm"},
    "steps-progress": {"steps": {"coef": 0.5, "form": "progress"}, "bootstrap_truncated": True},
    "shaping": {
        "shaping": {"normalise": True, "clip": (-1.0, 1.0), "truncation": 0.5, "overlong_share": 0.5},
        "normalise": "mean",
    },
}


def draw(seed: int) -> tuple[list[Scored], list[Graded]]:
    """Groups of any size, one of a single member, one whose rewards are equal; a NaN of the sampler's."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    groups = rng.integers(0, 3, count).tolist()
    scored, graded = [], []
    for number in range(count):
        length = int(rng.integers(1, LONGEST))
        mask = rng.random(length) < 0.7
        mask[int(rng.integers(length))] = True
        drawn = {n: rng.normal(-2, 0.5, length).astype(np.float32) for n in ("logprobs", "ref_logprobs", "values")}
        sampler = (drawn["logprobs"] + rng.normal(0, 0.2, length)).astype(np.float32)
        sampler[int(rng.integers(length))] = math.nan
        scored.append(
            Scored(
                prompt_ids=rng.integers(0, VOCABULARY, int(rng.integers(1, 5))),
                response_ids=rng.integers(0, VOCABULARY, length),
                action_mask=mask,
                sampler_logprobs=sampler,
                entropy=rng.random(length).astype(np.float32),
                final_value=float(rng.normal()),
                **drawn,
            )
        )
        first = int(np.flatnonzero(mask)[0])
        reward = 1.0 if groups[number] == 0 else float(rng.normal())
        graded.append(Graded(reward, groups[number], bool(rng.random() < 0.3), (0.7, 0.4), (first, length - 1)))
    return scored, graded


def experience_of(settings: dict[str, Any], scored: list[Scored], graded: list[Graded]) -> Experience:
    algorithm = AlgorithmSettings(**settings)
    state = RlState(algorithm.kl.coef)
    state = dataclasses.replace(state, rewards=state.rewards.updated([one.reward for one in graded]))
    return build_experience(scored, graded, algorithm, state, LONGEST)


def outputs_of(table: Tensor, batch: dict[str, Tensor], *, entropy: bool, garbage: float) -> Tensor:
    """Log-probs, and entropies, as the policy gives them; garbage wherever no action token is."""
    every = functional.log_softmax(table[batch["input_ids"][:, :-1]], dim=-1)
    taken = every.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    both = torch.stack([taken, -(every.exp() * every).sum(-1)])
    both = functional.pad(both, (1, 0))
    both = torch.where(batch["weights"] > 0, both, garbage)
    return both if entropy else both[0]


def step_of(
    settings: dict[str, Any], experience: Experience, layout: Layout, *, pad: int = 0, garbage: float = 0.0
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient, means of the metrics) of one optimizer step over all ranks, as the engine computes them."""
    algorithm = AlgorithmSettings(**settings)
    objective = PolicyObjective(algorithm, 1.0, algorithm.kl.coef, LONGEST)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    numbers = range(len(experience.scored))
    by_rank = [experience_batches(experience, numbers, layout, rank, pad) for rank in range(layout.ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    batches = [batch for own in by_rank for batch in own]
    totals: dict[str, float] = {}
    for batch in batches:
        for name, value in objective.denominators(batch).items():
            totals[name] = totals.get(name, 0.0) + value
    loss, sums = torch.zeros((), dtype=torch.float64), {}
    for batch in batches:
        outputs = outputs_of(table, batch, entropy=algorithm.entropy_coef > 0, garbage=garbage)
        parts = objective.loss(batch, outputs)
        loss = loss + sum(term.weight / totals[name] * term.numerator for name, term in parts.terms.items())
        for name, (total, count) in parts.metrics.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + float(total), before[1] + float(count)
    loss.backward()
    assert table.grad is not None
    return float(loss.detach()), table.grad, {name: total / count for name, (total, count) in sums.items()}


WHOLE = Layout(ranks=1, micro_batch_size=16, packing=False, capacity=16)
CUTS = [
    Layout(ranks=ranks, micro_batch_size=size, packing=packing, capacity=16)
    for ranks, size, packing in product((1, 3), (1, 2), (False, True))
]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_is_the_same_however_it_is_cut_padded_and_filled(name: str) -> None:
    for seed in SEEDS:
        experience = experience_of(ALGORITHMS[name], *draw(seed))
        loss, gradient, metrics = step_of(ALGORITHMS[name], experience, WHOLE)
        assert math.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert all(map(math.isfinite, [*metrics.values(), *experience.metrics.values()]))
        for layout, garbage in zip(CUTS, [math.nan, 1e9] * 4, strict=True):
            found = step_of(ALGORITHMS[name], experience, layout, pad=VOCABULARY - 1, garbage=garbage)
            assert found[0] == pytest.approx(loss, rel=1e-9, abs=1e-9)
            torch.testing.assert_close(found[1], gradient, rtol=1e-6, atol=1e-9)
            assert found[2] == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_do_not_depend_on_the_order_or_on_what_is_no_action(name: str) -> None:
    for seed in SEEDS:
        scored, graded = draw(seed)
        plain = experience_of(ALGORITHMS[name], scored, graded)
        for s in scored:
            for array in (s.sampler_logprobs, s.logprobs, s.ref_logprobs, s.values, s.entropy):
                assert array is not None
                array[~s.action_mask] = math.nan if seed % 2 else 1e9
        order = np.random.default_rng(seed).permutation(len(scored)).tolist()
        other = experience_of(ALGORITHMS[name], [scored[n] for n in order], [graded[n] for n in order])
        torch.testing.assert_close(other.advantages, plain.advantages[order], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.weights, plain.weights[order])
        assert other.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-5)
        expected, found = (step_of(ALGORITHMS[name], one, WHOLE) for one in (plain, other))
        assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_the_value_loss_is_the_same_however_it_is_cut(packing: bool) -> None:
    scored, graded = draw(0)
    experience = experience_of({}, scored, graded)
    objective = ValueObjective(AlgorithmSettings())

    def loss(layout: Layout) -> float:
        numerator = denominator = 0.0
        for rank in range(layout.ranks):
            for batch in experience_batches(experience, range(len(scored)), layout, rank, 0):
                scores = batch["input_ids"].double() / VOCABULARY
                numerator += float(objective.loss(batch, scores).terms["value"].numerator)
                denominator += objective.denominators(batch)["value"]
        return numerator / denominator

    cut = Layout(ranks=3, micro_batch_size=1, packing=packing, capacity=16)
    assert loss(cut) == pytest.approx(loss(WHOLE), rel=1e-6)
