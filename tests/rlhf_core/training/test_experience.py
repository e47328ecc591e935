"""From a scored rollout to what is trained on, against loops written from the papers' formulas."""

import numpy as np
import pytest

from rlhf_core.config.rl import AlgorithmSettings
from rlhf_core.training.experience import Scored, build_experience, experience_batch, kl_per_token

GAMMA, LAMBDA, KL = 0.9, 0.8, 0.3


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
                reward_score=0.0,
                **drawn,
            )
        )
    return made


def loop(one: Scored, reward: float) -> tuple[np.ndarray, np.ndarray]:
    """Schulman et al. 2016, eq. 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}, over the policy's own tokens."""
    actions = np.flatnonzero(one.action_mask)
    rewards = [-KL * (float(one.logprobs[t]) - float(one.ref_logprobs[t])) for t in actions]
    rewards[-1] += reward
    values = [float(one.values[t]) for t in actions] + [0.0]
    deltas = [rewards[i] + GAMMA * values[i + 1] - values[i] for i in range(len(actions))]
    advantages, returns = np.zeros(len(one.response_ids)), np.zeros(len(one.response_ids))
    for i, t in enumerate(actions):
        advantages[t] = sum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[i:]))
        returns[t] = advantages[t] + values[i]
    return advantages, returns


REWARDS = [1.0, -0.5, 2.0, 0.25]


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_and_returns_follow_the_formula(whiten: bool) -> None:
    scored = scored_rollout()
    algorithm = AlgorithmSettings(gamma=GAMMA, gae_lambda=LAMBDA, kl_coef=KL, whiten_advantages=whiten)
    experience = build_experience(scored, REWARDS, algorithm)
    expected = [loop(one, reward) for one, reward in zip(scored, REWARDS, strict=True)]
    if whiten:
        valid = np.concatenate([a[one.action_mask] for (a, _), one in zip(expected, scored, strict=True)])
        mean, std = valid.mean(), valid.std()
        whitened = [
            np.where(one.action_mask, (a - mean) / std, 0.0) for (a, _), one in zip(expected, scored, strict=True)
        ]
        expected = [(a, r) for a, (_, r) in zip(whitened, expected, strict=True)]
    for row, (advantages, returns) in enumerate(expected):
        count = len(advantages)
        assert experience.advantages[row, :count].tolist() == pytest.approx(advantages, abs=1e-5)
        assert experience.returns[row, :count].tolist() == pytest.approx(returns, abs=1e-5)
        assert not experience.advantages[row, count:].any()
        assert not experience.returns[row, count:].any()


def test_response_tokens_are_placed_behind_their_prompts() -> None:
    scored = scored_rollout()
    algorithm = AlgorithmSettings(gamma=GAMMA, gae_lambda=LAMBDA, kl_coef=KL, whiten_advantages=False)
    experience = build_experience(scored, REWARDS, algorithm)
    batch = experience_batch(experience, [2, 1], pad_token_id=0)
    assert batch["input_ids"].shape == (2, 10)
    for row, number in enumerate([2, 1]):
        one = scored[number]
        head, count = len(one.prompt_ids), len(one.response_ids)
        end = head + count
        assert batch["input_ids"][row, :head].tolist() == one.prompt_ids.tolist()
        assert batch["input_ids"][row, head:end].tolist() == one.response_ids.tolist()
        assert not batch["input_ids"][row, end:].any()
        assert batch["attention_mask"][row].tolist() == [1] * end + [0] * (10 - end)
        advantages, returns = loop(one, REWARDS[number])
        placed = {
            "action_mask": one.action_mask,
            "old_logprobs": one.logprobs,
            "old_values": one.values,
            "advantages": advantages,
            "returns": returns,
        }
        for name, values in placed.items():
            found = batch[name][row].float()
            assert found[head:end].tolist() == pytest.approx(np.asarray(values, dtype=float), abs=1e-5), name
            assert not found[:head].any(), name
            assert not found[end:].any(), name


def test_kl_is_the_mean_over_the_policys_own_tokens() -> None:
    scored = scored_rollout()
    own = [(o.logprobs[t], o.ref_logprobs[t]) for o in scored for t in range(len(o.action_mask)) if o.action_mask[t]]
    assert len(own) == 9
    assert kl_per_token(scored) == pytest.approx(sum(float(a) - float(b) for a, b in own) / 9, abs=1e-6)
