"""What gc takes and what it leaves, on stores on disk whose files are given an age."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.store.artifacts import publish, read_manifest
from rlhf_core.store.checkpoints import complete, upload_shards
from rlhf_core.store.gc import collect, find_garbage, note_inputs, note_use
from rlhf_core.store.keys import stage_key
from rlhf_core.store.leases import acquire
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.store.verify import verify

DAY = 86400.0
LIMIT = 30 * DAY


def age(store: Store, path: str, days: float) -> None:
    """Every file below `path` was last written so many days ago."""
    then = time.time() - days * DAY
    for file in Path(store.url, path).rglob("*"):
        os.utime(file, (then, then))


def artifact(store: Store, number: int, inputs: dict[str, str], days: float) -> Manifest:
    key = stage_key(stage="sft", version=1, settings={"seed": number}, inputs=inputs, data={}, code={})
    with tempfile.TemporaryDirectory() as temp:
        Path(temp, "rows.jsonl").write_text(f"{number}\n")
        fields = {"stage": "sft", "key": key.key, "key_source": key.source, "inputs": inputs}
        manifest = publish(store, local_dir=temp, manifest_fields=fields, lease=None)
    age(store, f"artifacts/sft/{key.key}", days)
    return manifest


def checkpoint(store: Store, key: str, days: float) -> None:
    with tempfile.TemporaryDirectory() as temp:
        Path(temp, "shard").write_text("w")
        complete(store, "sft", key, 40, upload_shards(store, "sft", key, 40, temp), {}, None)
    age(store, f"training/sft/{key}", days)


def present(store: Store, manifests: list[Manifest]) -> list[bool]:
    return [read_manifest(store, m.stage, m.key) is not None for m in manifests]


def gone(store: Store) -> list[tuple[str, str]]:
    return sorted((one.kind, one.path) for one in collect(store, LIMIT))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


# Artifact n may read any before it. (inputs, days old, pinned, read by a live run)
ARTIFACTS = st.lists(
    st.tuples(st.sets(st.integers(0, 8), max_size=3), st.sampled_from([1, 29, 31, 400]), *[st.booleans()] * 2),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(ARTIFACTS)
def test_what_is_kept_verifies_and_has_its_inputs(drawn: list[tuple[set[int], int, bool, bool]]):
    with tempfile.TemporaryDirectory() as temp:
        store = Store(temp)
        made: list[Manifest] = []
        for number, (reads, days, _, _) in enumerate(drawn):
            inputs = {f"in-{n}": made[n].key for n in sorted(reads) if n < number}
            made.append(artifact(store, number, inputs, days))
        pinned = {m.key for m, (_, _, pin, _) in zip(made, drawn, strict=True) if pin}
        acquire(store, "ppo", "ab" * 32, {}, 60)
        note_inputs(store, "ppo", "ab" * 32, [m.key for m, (*_, read) in zip(made, drawn, strict=True) if read])
        # By hand: roots, then whatever a kept one reads, from the last to the first.
        wanted = [days < 30 or pin or read for _, days, pin, read in drawn]
        for number in reversed(range(len(drawn))):
            for n in drawn[number][0] if wanted[number] else ():
                if n < number:
                    wanted[n] = True
        foreseen = [one.path for one in find_garbage(store, LIMIT, pinned)]
        assert [one.path for one in collect(store, LIMIT, pinned)] == foreseen
        assert present(store, made) == wanted
        assert not [finding for finding in verify(store) if finding.problem != "ok"]
        assert find_garbage(store, LIMIT, pinned) == []


def test_a_dry_run_deletes_nothing(store: Store):
    old = artifact(store, 0, {}, 31)
    (found,) = find_garbage(store, LIMIT)
    assert (found.kind, found.path, found.key) == ("artifact", f"artifacts/sft/{old.key}", old.key)
    assert found.size == sum(file.stat().st_size for file in Path(store.url).rglob("*") if file.is_file())
    assert present(store, [old]) == [True]


def test_what_a_pipeline_planned_or_promoted_stays(store: Store):
    planned, promoted, left = (artifact(store, n, {}, 31) for n in range(3))
    note_use(store, "run-1", [planned.key])
    store.write_bytes("models/chat/champion/1.json", f'{{"artifact": "artifacts/sft/{promoted.key}"}}'.encode())
    assert gone(store) == [("artifact", f"artifacts/sft/{left.key}")]
    age(store, "runs", 31)
    assert gone(store) == [("artifact", f"artifacts/sft/{planned.key}"), ("note of use", "runs/run-1.json")]


def test_training_goes_where_its_artifact_is_published_or_nobody_finishes_it(store: Store):
    done, fresh = artifact(store, 0, {}, 1), artifact(store, 1, {}, 1)
    checkpoint(store, done.key, 31)
    checkpoint(store, fresh.key, 1)
    store.write_bytes(f"training/sft/{done.key}/logs/a/driver.log", b"kept")
    abandoned, begun = "ab" * 32, "cd" * 32
    checkpoint(store, abandoned, 31)
    checkpoint(store, begun, 1)
    assert gone(store) == [
        ("training", f"training/sft/{abandoned}"),
        ("training checkpoint", f"training/sft/{done.key}/step-000040"),
    ]
    assert store.exists(f"training/sft/{done.key}/logs/a/driver.log")


def test_nothing_of_a_live_lease_goes(store: Store):
    key = "ab" * 32
    checkpoint(store, key, 31)
    store.write_bytes(f"artifacts/sft/{key}/attempt/x", b"half")
    store.write_bytes("cache/tokens/abc/COMPLETE.json", b"{}")
    acquire(store, "sft", key, {}, 60)
    old = artifact(store, 0, {}, 31)
    for path in ("artifacts", "cache"):
        age(store, path, 31)
    # It has not said yet what it reads: every artifact may be it.
    assert gone(store) == []
    note_inputs(store, "sft", key, [])
    assert gone(store) == [("artifact", f"artifacts/sft/{old.key}")]


def test_leases_attempts_and_token_caches_go_once_they_are_old(store: Store):
    made = artifact(store, 0, {}, 1)
    lease = acquire(store, "sft", made.key, {}, 60)
    lease.release()
    store.write_bytes(f"artifacts/sft/{made.key}/other/x", b"another attempt")
    store.write_bytes("cache/tokens/abc/COMPLETE.json", b"{}")
    assert gone(store) == []
    for path in (f"artifacts/sft/{made.key}/other", "training", "cache"):
        age(store, path, 31)
    assert gone(store) == [
        ("lease", f"training/sft/{made.key}/lease/000001.json"),
        ("token cache", "cache/tokens/abc"),
        ("unfinished attempt", f"artifacts/sft/{made.key}/other"),
    ]


@pytest.mark.parametrize("taken_by", ["lease", "note"])
def test_what_a_run_takes_up_while_gc_deletes_stays(store: Store, taken_by: str):
    first, second = sorted((artifact(store, n, {}, 31) for n in range(2)), key=lambda m: m.key)
    deleting = collect(store, LIMIT)
    assert next(deleting).key == first.key
    if taken_by == "note":
        note_use(store, "run-1", [second.key])
    else:
        acquire(store, "ppo", "ab" * 32, {}, 60)
        note_inputs(store, "ppo", "ab" * 32, [second.key])
    assert list(deleting) == []
    assert present(store, [first, second]) == [False, True]


def test_the_tokens_of_dumped_rollouts_stay_as_long_as_they(store: Store):
    made = artifact(store, 0, {}, 1)
    store.write_bytes(f"training/sft/{made.key}/rollouts/run.json", b'{"tokens": {"ptx": "abc"}}')
    store.write_bytes(f"training/sft/{'ab' * 32}/rollouts/run.json", b'{"tokens": {"ptx": "def"}}')
    for name in ("abc", "def"):
        store.write_bytes(f"cache/tokens/{name}/COMPLETE.json", b"{}")
    for path in ("training", "cache"):
        age(store, path, 31)
    # The second run was never finished.
    assert gone(store) == [("token cache", "cache/tokens/def"), ("training", f"training/sft/{'ab' * 32}")]


def test_drawings_go_once_their_artifact_is_published(store: Store):
    made, begun = artifact(store, 0, {}, 1), "ab" * 32
    for key in (made.key, begun):
        store.write_bytes(f"training/sft/{key}/samples/sampling-000000.npz", b"x")
    assert gone(store) == []
    age(store, f"training/sft/{made.key}", 31)
    assert gone(store) == [("kept drawings", f"training/sft/{made.key}/samples")]
