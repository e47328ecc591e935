"""From a scored rollout to what is trained on, against loops written from the papers' formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.algorithms.shaping import RunningMoments
from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.data.layout import Layout
from rlhf_core.training.experience import Graded, Scored, build_experience, shaped_rewards
from rlhf_core.training.rl_batches import experience_batches, shares
from rlhf_core.training.rl_state import RlState

GAMMA, LAMBDA, KL = 0.9, 0.8, 0.3
REWARDS = [1.0, -0.5, 2.0, 0.25]
GROUPS = [1, 0, 1, 0]
LAYOUT = Layout(ranks=1, micro_batch_size=8, packing=False, capacity=16)


def scored_rollout() -> list[Scored]:
    """4 trajectories; in the second the environment wrote tokens 1 and 2, in the third the last one."""
    rng = np.random.default_rng(7)
    masks = [[1, 1, 1], [1, 0, 0, 1, 1], [1, 1, 0], [1]]
    prompts = [4, 2, 7, 1]
    made = []
    for mask, prompt in zip(masks, prompts, strict=True):
        count = len(mask)
        drawn = {name: rng.normal(size=count).astype(np.float32) for name in ("logprobs", "ref_logprobs", "values")}
        made.append(
            Scored(
                prompt_ids=rng.integers(6, 32, prompt),
                response_ids=rng.integers(6, 32, count),
                action_mask=np.array(mask, dtype=bool),
                sampler_logprobs=(drawn["logprobs"] + 0.1 * rng.normal(size=count)).astype(np.float32),
                entropy=rng.uniform(size=count).astype(np.float32),
                final_value=float(rng.normal()),
                **drawn,
            )
        )
    return made


def graded(**given: Any) -> list[Graded]:
    """given: a list for each further field."""
    further = [{name: values[n] for name, values in given.items()} for n in range(len(REWARDS))]
    return [Graded(reward, group, **more) for reward, group, more in zip(REWARDS, GROUPS, further, strict=True)]


def built(scored: list[Scored], outcomes: list[Graded] | None = None, **settings: Any) -> Any:
    algorithm = AlgorithmSettings(**settings)
    return build_experience(scored, outcomes or graded(), algorithm, RlState(algorithm.kl.coef), 8)


def loop(one: Scored, reward: float, final: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Schulman et al. 2016, eq. 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}, over the policy's own tokens."""
    actions = np.flatnonzero(one.action_mask)
    rewards = [-KL * (float(one.logprobs[t]) - float(one.ref_logprobs[t])) for t in actions]
    rewards[-1] += reward
    values = [float(one.values[t]) for t in actions] + [final]
    deltas = [rewards[i] + GAMMA * values[i + 1] - values[i] for i in range(len(actions))]
    advantages, returns = np.zeros(len(one.response_ids)), np.zeros(len(one.response_ids))
    for i, t in enumerate(actions):
        advantages[t] = sum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[i:]))
        returns[t] = advantages[t] + values[i]
    return advantages, returns


def assert_rows(found: torch.Tensor, expected: list[np.ndarray]) -> None:
    for row, values in enumerate(expected):
        count = len(values)
        assert found[row, :count].tolist() == pytest.approx(values, abs=1e-5), row
        assert not found[row, count:].any()


GAE = {"gamma": GAMMA, "gae_lambda": LAMBDA, "kl": {"coef": KL}}


@pytest.mark.parametrize("normalise", ["none", "mean", "mean_std"])
def test_advantages_and_returns_follow_the_formula(normalise: str) -> None:
    scored = scored_rollout()
    experience = built(scored, **GAE, normalise=normalise)
    expected = [loop(one, reward) for one, reward in zip(scored, REWARDS, strict=True)]
    valid = np.concatenate([a[one.action_mask] for (a, _), one in zip(expected, scored, strict=True)])
    mean = 0.0 if normalise == "none" else valid.mean()
    std = valid.std() if normalise == "mean_std" else 1.0
    advantages = [
        np.where(one.action_mask, (a - mean) / std, 0.0) for (a, _), one in zip(expected, scored, strict=True)
    ]
    assert_rows(experience.advantages, advantages)
    assert_rows(experience.returns, [returns for _, returns in expected])


def test_a_response_that_was_cut_off_goes_on_with_its_value() -> None:
    scored, cut = scored_rollout(), [False, True, False, True]
    experience = built(scored, graded(truncated=cut), **GAE, normalise="none", bootstrap_truncated=True)
    expected = [loop(one, reward, one.final_value * off) for one, reward, off in zip(scored, REWARDS, cut, strict=True)]
    assert_rows(experience.advantages, [advantages for advantages, _ in expected])


# By hand: groups (1.0, 2.0) and (-0.5, 0.25).
HALF, SPREAD = np.array([-0.5, -0.375, 0.5, 0.375]), np.array([2**-0.5, 0.75 * 2**-0.5] * 2)
OUTCOMES = {
    "reinforce": np.array(REWARDS),
    "reinforce_baseline": HALF,
    "dr_grpo": HALF,
    "rloo": 2 * HALF,
    "group_norm": HALF / (SPREAD + 1e-6),
}


@pytest.mark.parametrize("place", ["reward", "loss"])
@pytest.mark.parametrize("estimator", OUTCOMES)
def test_advantages_without_a_critic_are_returns_to_go(estimator: str, place: str) -> None:
    scored = scored_rollout()
    kl = {"coef": KL, "place": place, "estimator": "k2"}
    experience = built(scored, estimator=estimator, gamma=GAMMA, normalise="none", kl=kl)
    expected = []
    for one, score in zip(scored, OUTCOMES[estimator], strict=True):
        actions = np.flatnonzero(one.action_mask)
        d = one.logprobs.astype(float) - one.ref_logprobs
        rewards = [-KL * d[t] ** 2 / 2 if place == "reward" else 0.0 for t in actions]
        rewards[-1] += score
        row = np.zeros(len(d))
        for i, t in enumerate(actions):
            row[t] = sum(GAMMA**k * reward for k, reward in enumerate(rewards[i:]))
        expected.append(row)
    assert_rows(experience.advantages, expected)
    assert experience.returns is None


def test_steps_are_rewarded_at_their_ends_beside_the_outcome() -> None:
    """Progress of 0.5 and then -0.25 in the second trajectory; its second step ends on the environment's token."""
    scored = scored_rollout()
    steps = {"step_scores": [(), (0.5, 0.25), (), ()], "step_ends": [(), (0, 2), (), ()]}
    given = {"estimator": "reinforce", "normalise": "none", "kl": {"coef": 0.0}}
    experience = built(scored, graded(**steps), **given, steps={"coef": 2.0, "form": "progress"})
    assert_rows(experience.advantages[1:2], [np.array([-0.5 + 2 * 0.25, 0, 0, -0.5, -0.5])])
    experience = built(scored, graded(**steps), **given, steps={"coef": 2.0, "form": "sum"})
    assert_rows(experience.advantages[1:2], [np.array([-0.5 + 2 * 0.75, 0, 0, -0.5, -0.5])])
    # With a baseline for the outcome, the steps of the group share one: 0.5 and 0.25 less their mean.
    given["estimator"] = "dr_grpo"
    experience = built(scored, graded(**steps), **given, steps={"coef": 2.0, "form": "sum"})
    assert_rows(experience.advantages[1:2], [np.array([-0.375, 0, 0, -0.375, -0.375])])


def test_shaping_in_its_order() -> None:
    """Rewards so far with mean 1 and deviation 0.5; lengths 3, 3, 2, 1 of at most 4, the last two penalised."""
    moments = RunningMoments(count=4, mean=1.0, squares=1.0)
    settings = AlgorithmSettings(
        shaping={"normalise": True, "clip": (-2.0, 1.5), "truncation": 0.5, "overlong_share": 0.5}
    ).shaping
    found = shaped_rewards(scored_rollout(), graded(truncated=[False, True, False, True]), settings, moments, 4)
    assert found.tolist() == pytest.approx([0.0 - 0.5, -2.0 * 0.5 - 0.5, 1.5 - 0.0, -1.5 * 0.5])
    plain = shaped_rewards(scored_rollout(), graded(), AlgorithmSettings().shaping, moments, 4)
    assert plain.tolist() == REWARDS


def test_sampler_mismatch_reaches_the_weights_of_the_loss() -> None:
    scored = scored_rollout()
    scored[0].sampler_logprobs[1] = math.nan
    experience = built(scored, mismatch={"level": "token", "mode": "clip", "low": 0.0, "high": 1.05})
    for row, one in enumerate(scored):
        for t in np.flatnonzero(one.action_mask):
            w = math.exp(float(one.logprobs[t]) - float(one.sampler_logprobs[t]))
            expected = 1.0 if math.isnan(w) else min(w, 1.05)
            assert experience.weights[row, t].item() == pytest.approx(expected, rel=1e-5)
    assert 0 < experience.metrics["mismatch/cut"] < 1
    assert experience.metrics["mismatch/kl"] > 0


def test_metrics_of_a_rollout() -> None:
    scored = scored_rollout()
    metrics = built(scored, **GAE, normalise="none").metrics
    own = [np.flatnonzero(one.action_mask) for one in scored]
    kl = [sum(float(o.logprobs[t]) - float(o.ref_logprobs[t]) for t in at) for o, at in zip(scored, own, strict=True)]
    assert metrics["kl"] == pytest.approx(sum(kl) / 9, abs=1e-6)
    assert metrics["kl/trajectory"] == pytest.approx(np.mean(kl), abs=1e-6)
    entropies = [float(o.entropy[t]) for o, at in zip(scored, own, strict=True) for t in at]
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), abs=1e-6)
    assert metrics["groups/spread"] == pytest.approx((1.0 + 0.75) / 2)
    assert metrics["groups/std"] == pytest.approx((1.0 + 0.75) / 2 / math.sqrt(2))  # with n - 1, of two
    assert (metrics["groups/equal"], metrics["groups/alone"], metrics["groups/short"]) == (0.0, 0.0, 0.0)
    values = np.concatenate([o.values[at] for o, at in zip(scored, own, strict=True)])
    returns = np.concatenate([loop(o, r)[1][at] for o, r, at in zip(scored, REWARDS, own, strict=True)])
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-5)
    assert metrics["returns"] == pytest.approx(np.mean(returns), abs=1e-5)


def test_a_group_that_lost_responses_is_counted() -> None:
    metrics = built(scored_rollout()[:3], graded()[:3], estimator="rloo").metrics
    assert (metrics["groups/alone"], metrics["groups/short"]) == (1.0, 1.0)


def test_without_reference_and_critic_there_is_nothing_of_theirs() -> None:
    bare = [
        Scored(s.prompt_ids, s.response_ids, s.action_mask, s.sampler_logprobs, s.logprobs, s.entropy)
        for s in scored_rollout()
    ]
    experience = built(bare, estimator="group_norm", kl={"coef": 0.0})
    assert not {"kl", "values", "explained_variance"} & experience.metrics.keys()
    # Of each pair the better has (a - b) / 2 over the standard deviation |a - b| / sqrt(2), at each of its tokens.
    better = [-1, -1, 1, 1]  # 1.0 and 2.0 are a pair, -0.5 and 0.25
    counts = [int(s.action_mask.sum()) for s in bare]
    expected = np.dot(better, counts) / sum(counts) / math.sqrt(2)
    assert experience.metrics["returns"] == pytest.approx(expected, abs=1e-5)
    (batch,) = experience_batches(experience, range(4), LAYOUT, 0, 0)
    assert not {"ref_logprobs", "old_values", "returns"} & batch.keys()


@pytest.mark.parametrize("packing", [False, True])
def test_response_tokens_are_placed_behind_their_prompts(packing: bool) -> None:
    scored = scored_rollout()
    experience = built(scored, **GAE, normalise="none")
    layout = Layout(ranks=1, micro_batch_size=8, packing=packing, capacity=20)
    (batch,) = experience_batches(experience, [2, 1], layout, 0, pad_token_id=0)
    assert batch["input_ids"].shape == ((1, 17) if packing else (2, 10))
    for place, number in enumerate([2, 1]):  # the longest first
        one, here = scored[number], batch["segments"] == place
        assert batch["input_ids"][here].tolist() == [*one.prompt_ids, *one.response_ids]
        assert batch["position_ids"][here].tolist() == list(range(int(here.sum())))
        advantages, returns = loop(one, REWARDS[number])
        placed = {
            "weights": one.action_mask,
            "old_logprobs": one.logprobs,
            "ref_logprobs": one.ref_logprobs,
            "old_values": one.values,
            "advantages": advantages,
            "returns": returns,
            "loss_weights": one.action_mask,
        }
        for name, values in placed.items():
            expected = [0.0] * len(one.prompt_ids) + np.asarray(values, dtype=float).tolist()
            assert batch[name][here].tolist() == pytest.approx(expected, abs=1e-5), name
    for name in ("old_logprobs", "advantages", "returns", "loss_weights"):
        assert not batch[name][batch["segments"] < 0].any(), name


@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("packing", [False, True])
def test_every_trajectory_is_dealt_once_and_no_rank_is_empty(count: int, packing: bool) -> None:
    lengths = np.random.default_rng(count).integers(2, 16, count).tolist()
    dealt = shares(lengths, Layout(ranks=3, micro_batch_size=2, packing=packing, capacity=16))
    assert len({len(share.micro_batches) for share in dealt}) == 1
    seen = [share.numbers[at] for share in dealt for micro in share.micro_batches for row in micro for at in row]
    assert sorted(seen) == list(range(count))
    assert all(share.numbers for share in dealt)
