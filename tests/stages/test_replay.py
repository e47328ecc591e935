"""What a replay refuses before anything starts. tests/stages/test_ppo_rewards.py replays a run."""

from pathlib import Path

import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.dump import RolloutDump
from rlhf_core.store.store import Store, StoreError
from stages.replay import replay

KEY = "ab" + "0" * 62
SETTINGS = {
    "optimizer": {"lr": 1.0},
    "algorithm": {"preset": "grpo"},
    "rollout": {"prompts": 3, "samples_per_prompt": 2, "max_new_tokens": 4, "max_prompt_len": 4},
    "reward": {"exact": 1.0, "regex": {"pattern": "x", "weight": 0.5}},
    "steps": 4,
    "batch_size": 6,
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """With a run that has kept the rollouts of steps 1 and 2, and another run."""
    made = Store(str(tmp_path / "store"))
    dump = RolloutDump(made, "ppo", KEY)
    settings = PpoSettings.model_validate(SETTINGS).model_dump(mode="json")
    dump.start({"settings": settings, "inputs": {}, "tokens": {}})
    for step in (1, 2):
        made.write_bytes(f"training/ppo/{KEY}/rollouts/step-{step:06d}.safetensors", b"")
    made.write_bytes(f"training/ppo/ac{'0' * 62}/lease/1.json", b"")
    return made


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.rollout.temperature=0.5", "ppo.rollout is what the rollouts were drawn with; run the stage to change it"),
        ("ppo.policy=dpo", "ppo.policy is what the rollouts were drawn with"),
        ("ppo.algorithm.dynamic_sampling.enabled=true", "ppo.algorithm.dynamic_sampling is what the rollouts were dr"),
        (
            "ppo.reward.regex.pattern=y",
            "ppo.reward: a replay can change the weights of exact, regex, which",
        ),
        (
            "ppo.reward.math=1",
            "ppo.reward: a replay can change the weights of exact, regex, which",
        ),
        ("ppo.ptx={coef: 1, max_len: 8}", "ppo: these settings need rows for ptx, which the run did not have"),
        ("sft.optimizer.lr=1", "set: sft is no setting of a replay; give those of ppo"),
        ("ppo.steps=1", "ppo.steps is 1, and 2 rollouts are to be trained on; raise it"),
    ],
)
def test_what_the_rollouts_do_not_fit_is_refused(store: Store, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        replay(store, KEY, tmp_path / "out", [override])
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_weights_of_what_was_measured_and_the_algorithm_may_change(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out" / "full").mkdir(parents=True)
    changes = ["ppo.reward.exact=0", "ppo.reward.regex.weight=2", "ppo.algorithm.clip_high=0.3", "ppo.trainer.ranks=2"]
    with pytest.raises(StoreError, match="out is not empty; give a new directory"):  # the last thing that is looked at
        replay(store, "ab", tmp_path / "out", changes)


@pytest.mark.parametrize(
    ("key", "steps", "message"),
    [
        ("b", None, "has no run of ppo with a key b; give one whole"),
        ("a", None, "has 2 runs whose keys start with a; give one whole"),
        ("ac", None, "has no dumped rollouts of ppo ac0000000000; run the stage with ppo.dump_rollouts=true"),
        ("ab", 3, "the run ab0000000000 has kept the rollouts of 2 steps, and step 3 is not among them"),
    ],
)
def test_a_run_without_these_rollouts_is_refused(
    store: Store, tmp_path: Path, key: str, steps: int | None, message: str
) -> None:
    with pytest.raises(StoreError) as caught:
        replay(store, key, tmp_path / "out", steps=steps)
    assert message in str(caught.value)
