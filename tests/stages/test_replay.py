"""What a replay refuses before anything starts. tests/stages/test_ppo_rewards.py replays a run."""

from pathlib import Path

import numpy as np
import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.dump import RolloutDump
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.store.gc import find_garbage
from rlhf_core.store.store import Store, StoreError
from stages.replay import _in_use, replay

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
        ("ppo.algorithm.preset=dr_grpo", 'has every field; leave it out and set ppo.algorithm.estimator="dr_grpo"'),
        ("ppo.algorithm.preset=nothing", "ppo.algorithm"),
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
        ("ac", None, "has no dumped rollouts of ppo ac0000000000; a new run keeps them, one of another ppo.seed"),
        ("ab", 3, "the run ab0000000000 has kept the rollouts of 2 steps, and step 3 is not among them"),
    ],
)
def test_a_run_without_these_rollouts_is_refused(
    store: Store, tmp_path: Path, key: str, steps: int | None, message: str
) -> None:
    with pytest.raises(StoreError) as caught:
        replay(store, key, tmp_path / "out", steps=steps)
    assert message in str(caught.value)


def with_ptx(store: Store) -> None:
    """The run trained beside rows of ptx, tokenised under the key `rows`."""
    settings = PpoSettings.model_validate({**SETTINGS, "ptx": {"coef": 1.0, "max_len": 8}}).model_dump(mode="json")
    RolloutDump(store, "ppo", KEY).start({"settings": settings, "inputs": {}, "tokens": {"ptx": "rows"}})


@pytest.mark.parametrize(("setting", "value"), [("max_len", "9"), ("text.truncation", "cut")])
def test_rows_of_ptx_cannot_be_tokenised_otherwise(store: Store, tmp_path: Path, setting: str, value: str) -> None:
    with_ptx(store)
    with pytest.raises(SettingsError, match=rf"ppo\.ptx\.{setting.split('.')[0]} is what the rows were tokenised with"):
        replay(store, KEY, tmp_path / "out", [f"ppo.ptx.{setting}={value}"])


def test_lost_tokens_of_ptx_are_refused_before_anything_starts(store: Store, tmp_path: Path) -> None:
    with_ptx(store)
    with pytest.raises(StoreError, match="has lost the rows of ptx as tokens, cache/tokens/rows"):
        replay(store, KEY, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert store.list_names("training/replay") == []  # no lease is left


def test_a_source_that_failed_unweighted_gets_no_weight(store: Store, tmp_path: Path) -> None:
    settings = PpoSettings.model_validate(
        {**SETTINGS, "reward": {"exact": 1.0, "regex": {"pattern": "x", "weight": 0}}}
    )
    dump = RolloutDump(store, "ppo", KEY)
    dump.start({"settings": settings.model_dump(mode="json"), "inputs": {}, "tokens": {}})
    scored, failed = {"exact": 1.0, "regex": 1.0}, {"exact": 1.0}
    for step, rewards in ((1, [scored, scored]), (2, [scored, failed])):
        dump.write(step, [_response(one) for one in rewards], {})
    with pytest.raises(SettingsError, match="regex had weight 0 in the run and failed for 1 of 2 responses of step 2"):
        replay(store, KEY, tmp_path / "out", ["ppo.reward.regex.weight=1"])
    assert not (tmp_path / "out").exists()


def _response(rewards: dict[str, float]) -> Trajectory:
    return Trajectory(
        prompt_ids=np.array([1]),
        response_ids=np.array([2]),
        action_mask=np.array([True]),
        sampler_logprobs=np.array([-1.0], np.float32),
        version_spans=(VersionSpan(0, 0, 1),),
        group_id=0,
        prompt_id=0,
        sample_id=0,
        finish_reason="stop",
        rewards=rewards,
    )


def test_gc_takes_nothing_while_a_replay_runs(store: Store) -> None:
    store.write_bytes("cache/tokens/rows/COMPLETE.json", b"{}")
    with _in_use(store, KEY, {"inputs": {}}):
        assert not [one for one in find_garbage(store, -60) if KEY in one.path or one.kind == "token cache"]
    assert [one.path for one in find_garbage(store, -60) if one.kind == "token cache"] == ["cache/tokens/rows"]
