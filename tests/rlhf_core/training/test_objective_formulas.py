"""RL's whole losses, and their gradients, against NumPy loops over tokens that are written from the papers.

Values: each term of an optimizer step. Gradients: finite differences of the loops in float64, with what a paper holds
constant (CISPO's weight, the slope of an unbiased KL) held constant. What stands at other positions is NaN or 1e9.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.training.rl_objectives import PolicyObjective, ValueObjective

LONGEST = 7
# Two samples in the first row and fill behind them, one in the second. Of the first sample the second token is none of
# the policy's, of the last one its first and last.
SEGMENTS = np.array([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
MASK = np.array([[1, 0, 1, 0, 1, 0], [0, 1, 1, 1, 1, 0]], dtype=bool)
SAMPLES = [[(0, 0), (0, 2)], [(0, 4)], [(1, 1), (1, 2), (1, 3), (1, 4)]]

LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"loss": "clip", "clip_low": 0.2, "clip_high": 0.28},
    "dual": {"loss": "clip", "dual_clip": 1.4},
    "gspo": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.15},
    "gspo dual": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2},
    "cispo": {"loss": "cispo", "clip_low": 0.3, "clip_high": 0.3},
}
KLS: dict[str, dict[str, Any]] = {
    "none": {"coef": 0.0},
    "k2": {"coef": 0.3, "place": "loss", "estimator": "k2"},
    "k3": {"coef": 0.3, "place": "loss", "estimator": "k3"},
    **{
        f"{name} unbiased": {"coef": 0.3, "place": "loss", "estimator": name, "unbiased_gradient": True}
        for name in ("k1", "k2", "k3")
    },
}


def drawn(seed: int) -> dict[str, np.ndarray]:
    """Ratios between 0.3 and 3 in the main, advantages of both signs."""
    rng = np.random.default_rng(seed)
    old = rng.normal(-2.0, 0.5, MASK.shape)
    return {
        "logprobs": old + rng.normal(0.0, 0.5, MASK.shape),
        "entropies": rng.uniform(0.1, 2.0, MASK.shape),
        "old_logprobs": old,
        "ref_logprobs": rng.normal(-2.0, 0.5, MASK.shape),
        "advantages": rng.normal(0.0, 1.0, MASK.shape),
        "loss_weights": rng.uniform(0.5, 1.5, MASK.shape),
    }


def aggregated(losses: list[list[float]], how: str) -> float:
    if how == "token_mean":
        return float(np.mean([loss for own in losses for loss in own]))
    divisors = [len(own) if how == "sequence_mean" else LONGEST for own in losses]
    return float(np.mean([sum(own) / divisor for own, divisor in zip(losses, divisors, strict=True)]))


def clipped(ratio: float, advantage: float, algorithm: AlgorithmSettings) -> float:
    """Schulman et al. 2017, eq. 7; DAPO's two bounds; Ye et al. 2020 where the advantage is negative."""
    bounded = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
    objective = min(ratio * advantage, bounded * advantage)
    if algorithm.dual_clip is not None and advantage < 0:
        objective = max(objective, algorithm.dual_clip * advantage)
    return -objective


def policy_losses(values: dict[str, np.ndarray], fixed: np.ndarray, algorithm: AlgorithmSettings) -> list[list[float]]:
    """Of each sample's tokens. fixed: the log-probs at which what is held constant is taken."""
    found = []
    for places in SAMPLES:
        logs = [values["logprobs"][at] - values["old_logprobs"][at] for at in places]
        sequence = math.exp(sum(logs) / len(logs))  # Zheng et al. 2025, eq. 7
        own = []
        for at, log in zip(places, logs, strict=True):
            advantage = values["advantages"][at]
            if algorithm.loss == "cispo":  # MiniMax 2025, eq. 4 and 5
                weight = math.exp(fixed[at] - values["old_logprobs"][at])
                weight = min(max(weight, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
                loss = -weight * advantage * values["logprobs"][at]
            else:
                loss = clipped(sequence if algorithm.loss == "gspo" else math.exp(log), advantage, algorithm)
            own.append(loss * values["loss_weights"][at])
        found.append(own)
    return found


def kl_losses(values: dict[str, np.ndarray], fixed: np.ndarray, algorithm: AlgorithmSettings) -> list[list[float]]:
    """Schulman 2020. Unbiased: the value at `fixed`, and w * d * (change of the log-prob) behind it."""

    def estimate(logprob: float, reference: float) -> float:
        d = logprob - reference
        return {"k1": d, "k2": d**2 / 2, "k3": math.exp(-d) - 1 + d}[algorithm.kl.estimator]

    found = []
    for places in SAMPLES:
        own = []
        for at in places:
            now, reference = values["logprobs"][at], values["ref_logprobs"][at]
            if algorithm.kl.unbiased_gradient:
                slope = math.exp(fixed[at] - values["old_logprobs"][at]) * (fixed[at] - reference)
                own.append(estimate(fixed[at], reference) + slope * (now - fixed[at]))
            else:
                own.append(estimate(now, reference))
        found.append(own)
    return found


def whole_loss(values: dict[str, np.ndarray], fixed: np.ndarray, algorithm: AlgorithmSettings) -> float:
    how = algorithm.aggregation
    loss = aggregated(policy_losses(values, fixed, algorithm), how)
    if algorithm.kl.coef:
        loss += algorithm.kl.coef * aggregated(kl_losses(values, fixed, algorithm), how)
    entropies = [[float(values["entropies"][at]) for at in places] for places in SAMPLES]
    return loss - algorithm.entropy_coef * aggregated(entropies, how)


def differences(
    function: Callable[[dict[str, np.ndarray]], float], values: dict[str, np.ndarray], name: str, h: float = 1e-6
) -> np.ndarray:
    """The gradient with respect to `values[name]` by central differences."""
    gradient = np.zeros(values[name].shape)
    for place in np.ndindex(gradient.shape):
        step = np.zeros(gradient.shape)
        step[place] = h
        up, down = ({**values, name: values[name] + sign * step} for sign in (1, -1))
        gradient[place] = (function(up) - function(down)) / (2 * h)
    return gradient


def batch_of(values: dict[str, np.ndarray], garbage: float) -> dict[str, torch.Tensor]:
    """In float64, with garbage at each position that is no action token."""
    return {
        "input_ids": torch.zeros(MASK.shape, dtype=torch.long),
        "position_ids": torch.zeros(MASK.shape, dtype=torch.long),
        "segments": torch.tensor(SEGMENTS),
        "weights": torch.tensor(MASK, dtype=torch.float32),
        "real": torch.ones(len(SAMPLES)),
        **{name: torch.tensor(np.where(MASK, own, garbage)) for name, own in values.items()},
    }


def found_loss(objective: Any, batch: dict[str, torch.Tensor], outputs: torch.Tensor) -> float:
    """The loss of the step; its gradient is left at `outputs`. Metrics are finite, all but one means over tokens."""
    parts = objective.loss(batch, outputs)
    denominators = objective.denominators(batch)
    terms = [term.weight / denominators[name] * term.numerator for name, term in parts.terms.items()]
    loss = torch.stack(terms).sum()
    loss.backward()
    assert all(math.isfinite(float(total)) for total, _ in parts.metrics.values())
    counts = {name: float(count) for name, (_, count) in parts.metrics.items()}
    assert counts.pop("surrogate", None) == denominators.get("policy")  # it is aggregated as the loss is
    assert all(count == MASK.sum() for count in counts.values())
    return loss.item()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_policys_loss_and_gradient(loss: str, kl: str, aggregation: str) -> None:
    algorithm = AlgorithmSettings(**LOSSES[loss], kl=KLS[kl], aggregation=aggregation, entropy_coef=0.1)
    objective = PolicyObjective(algorithm, 1.0, algorithm.kl.coef, LONGEST)
    for seed, garbage in product(range(2), (math.nan, 1e9)):
        values = drawn(seed)
        logprobs, entropies = values["logprobs"], values["entropies"]
        outputs = torch.tensor(np.where(MASK, np.stack([logprobs, entropies]), garbage), requires_grad=True)
        found = found_loss(objective, batch_of(values, garbage), outputs)
        assert found == pytest.approx(whole_loss(values, logprobs, algorithm), rel=1e-6)
        expected = partial(whole_loss, fixed=logprobs, algorithm=algorithm)
        slopes = [differences(expected, values, name) for name in ("logprobs", "entropies")]
        assert outputs.grad is not None
        np.testing.assert_allclose(outputs.grad, np.stack(slopes), rtol=1e-5, atol=1e-8)
        assert not outputs.grad[:, ~MASK].any()


def test_the_cases_reach_every_branch() -> None:
    """Ratios on both sides of each bound, with advantages of both signs."""
    values = [drawn(seed) for seed in range(2)]
    ratio = np.concatenate([np.exp(one["logprobs"] - one["old_logprobs"])[MASK] for one in values])
    advantages = np.concatenate([one["advantages"][MASK] for one in values])
    for sign in (-1, 1):
        own = ratio[np.sign(advantages) == sign]
        assert own.min() < 0.8
        assert own.max() > 1.4
        assert ((own > 0.8) & (own < 1.2)).any()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_critics_loss_and_gradient(clip: float | None) -> None:
    """Schulman et al. 2017 with the clipped values of its reference implementation; token mean. V of a token's state is
    the score one place before it."""

    def expected(values: dict[str, np.ndarray]) -> float:
        losses = []
        for row, column in (at for places in SAMPLES for at in places if at[1]):
            old, wanted = values["old_values"][row, column], values["returns"][row, column]
            value = values["scores"][row, column - 1]
            plain = (value - wanted) ** 2
            if clip is not None:
                plain = max(plain, (old + min(max(value - old, -clip), clip) - wanted) ** 2)
            losses.append(0.5 * plain)
        return float(np.mean(losses))

    objective = ValueObjective(AlgorithmSettings(value_clip=clip))
    for seed, garbage in product(range(3), (math.nan, 1e9)):
        rng = np.random.default_rng(seed)
        values = {name: rng.normal(size=MASK.shape) for name in ("old_values", "returns", "scores")}
        batch = batch_of(values, garbage)
        batch["weights"][0, 0] = 0  # a row's first token is of the prompt: there is no score before it
        used = np.pad((MASK & (np.arange(6) > 0))[:, 1:], ((0, 0), (0, 1)))
        outputs = torch.tensor(np.where(used, values["scores"], garbage), requires_grad=True)
        parts = objective.loss(batch, outputs)
        loss = parts.terms["value"].numerator / objective.denominators(batch)["value"]
        loss.backward()
        assert loss.item() == pytest.approx(expected(values), rel=1e-9)
        assert outputs.grad is not None
        slope = differences(expected, values, "scores")
        np.testing.assert_allclose(outputs.grad, slope, rtol=1e-5, atol=1e-8)
        assert not outputs.grad[~used].any()
