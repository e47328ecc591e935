"""Rollouts in the store: what is read is what was written, and nothing else is taken for it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlhf_core.rollout.dump import RolloutDump, packed, unpacked
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.store.store import Store, StoreError


def trajectory(number: int, length: int, spans: tuple[VersionSpan, ...], **more: Any) -> Trajectory:
    rng = np.random.default_rng(number)
    return Trajectory(
        prompt_ids=rng.integers(0, 100, 3 + number),
        response_ids=rng.integers(0, 100, length),
        action_mask=rng.random(length) < 0.7,
        sampler_logprobs=rng.standard_normal(length).astype(np.float32),
        version_spans=spans,
        group_id=number // 2,
        prompt_id=70 + number // 2,
        sample_id=number,
        finish_reason="length" if number % 2 else "stop",
        **more,
    )


def rollout() -> list[Trajectory]:
    nan = trajectory(2, 4, (VersionSpan(6, 0, 4),), rewards={"exact": 0.0}, scores={"exact": 0.0})
    nan.sampler_logprobs[1] = np.nan
    return [
        trajectory(0, 2, (VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)), rewards={"rm": 0.1, "exact": 1.0}),
        trajectory(
            1,
            5,
            (VersionSpan(6, 0, 5),),
            rewards={"rm": 1 / 3},
            scores={"rm": 2.5},
            step_scores=(0.1, 0.25),
            step_ends=(1, 4),
            model_inputs={"pixels": np.ones((2, 3), np.float16)},
        ),
        nan,
    ]


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, with types."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[name], right[name]) for name in left)
    return type(left) is type(right) and left == right


def test_a_rollout_is_read_as_it_was_written():
    found, metrics = unpacked(packed(3, rollout(), {"reward/failed": 2.0}))
    for one, other in zip(rollout(), found, strict=True):
        for field in dataclasses.fields(Trajectory):
            assert equal(getattr(one, field.name), getattr(other, field.name)), field.name
    assert metrics == {"reward/failed": 2.0}


def test_the_same_rollout_gives_the_same_bytes():
    assert packed(3, rollout(), {"a": 1.0}) == packed(3, rollout(), {"a": 1.0})


def test_a_dump_knows_its_run_and_its_steps(tmp_path):
    dump = RolloutDump(Store(str(tmp_path)), "ppo", "k" * 64)
    with pytest.raises(StoreError, match=r"has no dumped rollouts of ppo kkkkkkkkkkkk; a new run keeps them, one of"):
        dump.run()
    dump.start({"settings": {"steps": 2}})
    for step in (2, 10):
        dump.write(step, rollout(), {})
    dump.write(2, rollout()[:1], {})  # drawn again after a restart
    assert (dump.run(), dump.steps()) == ({"settings": {"steps": 2}}, [2, 10])
    assert [len(dump.read(step)[0]) for step in dump.steps()] == [1, 3]
    with pytest.raises(StoreError, match="has no rollout of step 3 of ppo kkkkkkkkkkkk; it has 2, 10"):
        dump.read(3)


def test_a_large_rollout_is_read_in_one_pass():
    """Spans looked up for each response would be 4 million here."""
    rows = [trajectory(number, 1, (VersionSpan(number, 0, 1),)) for number in range(2000)]
    found, _ = unpacked(packed(1, rows, {}))
    assert [one.version_spans for one in found] == [(VersionSpan(number, 0, 1),) for number in range(2000)]


@pytest.mark.parametrize("at", [-1, 200, 9])
def test_a_damaged_file_is_refused(tmp_path, at):
    dump = RolloutDump(Store(str(tmp_path)), "ppo", "key")
    content = bytearray(packed(1, rollout(), {}))
    content[at] ^= 1
    dump.store.write_bytes("training/ppo/key/rollouts/step-000001.safetensors", bytes(content))
    with pytest.raises(StoreError, match=r"step-000001\.safetensors in store .* is damaged"):
        dump.read(1)
