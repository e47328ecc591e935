import hashlib
import json
from pathlib import Path

import pytest

from rlhf_core.store import checkpoints
from rlhf_core.store.leases import LeaseLost, acquire
from rlhf_core.store.store import Store, StoreError

KEY = "ab" * 32
TOP = f"training/sft/{KEY}"


def shards(path: Path, rank: int, text: str) -> Path:
    directory = path / f"{text}-{rank}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank{rank}.pt").write_text(text)
    return directory


def save(
    store: Store, tmp_path: Path, step: int, text: str | None = None, metric: float | None = None
) -> dict[str, str]:
    text = text or f"step {step}"
    both = [checkpoints.upload_shards(store, "sft", KEY, step, shards(tmp_path, rank, text)) for rank in range(2)]
    checkpoints.complete(store, "sft", KEY, step, both[0] + both[1], {"epoch": 1}, None, metric)
    return both[0].files | both[1].files


def test_a_whole_checkpoint_comes_back(store: Store, tmp_path: Path) -> None:
    assert checkpoints.newest_complete(store, "sft", KEY) == (None, [])
    files = save(store, tmp_path, 40)
    assert files == {f"rank{rank}.pt": hashlib.sha256(b"step 40").hexdigest() for rank in range(2)}
    assert store.list_names(f"{TOP}/step-000040") == ["COMPLETE", "rank0.pt", "rank1.pt"]
    marker = json.loads(store.read_bytes(f"{TOP}/step-000040/COMPLETE"))
    assert marker == {"step": 40, "files": files, "size": 2 * len("step 40"), "extra": {"epoch": 1}, "metric": None}
    found, skipped = checkpoints.newest_complete(store, "sft", KEY)
    assert found == checkpoints.Checkpoint(40, f"{TOP}/step-000040", files, {"epoch": 1}, size=14)
    assert skipped == []
    there = checkpoints.download(store, found, tmp_path / "back")
    assert sorted(path.name for path in there.iterdir()) == ["rank0.pt", "rank1.pt"]


def test_the_newest_whole_one_is_taken_and_the_others_are_named(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 20)
    save(store, tmp_path, 9)
    checkpoints.upload_shards(store, "sft", KEY, 40, shards(tmp_path, 0, "half"))
    store.write_bytes(f"{TOP}/step-000060/COMPLETE", b'{"step": 60, "fil')
    store.write_bytes(f"{TOP}/logs/driver.log", b"")
    found, skipped = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    assert found.step == 20
    assert skipped == ["step-000060", "step-000040"]


def test_steps_are_ordered_as_numbers(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 999_999)
    save(store, tmp_path, 1_000_000)
    found, _ = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    assert found.step == 1_000_000


def test_a_damaged_checkpoint_is_named(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 40)
    store.write_bytes(f"{TOP}/step-000040/rank1.pt", b"damaged")
    found, _ = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    with pytest.raises(StoreError, match=r"step-000040/rank1\.pt .*damaged"):
        checkpoints.download(store, found, tmp_path / "back")


def test_saving_a_step_again_is_not_whole_until_it_is(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 20)
    save(store, tmp_path, 40, "first")
    checkpoints.upload_shards(store, "sft", KEY, 40, shards(tmp_path, 0, "second"))
    found, skipped = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    assert (found.step, skipped) == (20, ["step-000040"])
    save(store, tmp_path, 40, "second")
    found, _ = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    there = checkpoints.download(store, found, tmp_path / "back")
    assert (there / "rank0.pt").read_text() == "second"


def test_who_lost_the_lease_neither_uploads_nor_completes(store: Store, tmp_path: Path) -> None:
    lease = acquire(store, "sft", KEY, {"flow_run": "slow"}, 60.0, clock=lambda: 1000.0)
    files = checkpoints.upload_shards(store, "sft", KEY, 40, shards(tmp_path, 0, "slow"), lease)
    acquire(store, "sft", KEY, {"flow_run": "taker"}, 60.0, clock=lambda: 2000.0)
    with pytest.raises(LeaseLost, match="'taker'"):
        checkpoints.complete(store, "sft", KEY, 40, files, {}, lease)
    assert checkpoints.newest_complete(store, "sft", KEY) == (None, ["step-000040"])
    save(store, tmp_path, 40, "taker")
    with pytest.raises(LeaseLost, match="'taker'"):
        checkpoints.upload_shards(store, "sft", KEY, 40, shards(tmp_path, 0, "slow"), lease)
    found, _ = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    assert checkpoints.download(store, found, tmp_path / "back").is_dir()


def test_a_checkpoint_without_files_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="without files"):
        checkpoints.complete(store, "sft", KEY, 40, checkpoints.Shards({}, 0), {}, None)


def test_rotation_keeps_the_newest_whole_ones(store: Store, tmp_path: Path) -> None:
    for step in (10, 30, 40):
        save(store, tmp_path, step)
    for step in (5, 35, 50):
        checkpoints.upload_shards(store, "sft", KEY, step, shards(tmp_path, 0, "half"))
    assert checkpoints.rotate(store, "sft", KEY, keep=2) == ["step-000035", "step-000010", "step-000005"]
    assert store.list_names(TOP) == ["step-000030", "step-000040", "step-000050"]
    assert checkpoints.rotate(store, "sft", KEY, keep=2) == []
    with pytest.raises(ValueError, match="keep=0"):
        checkpoints.rotate(store, "sft", KEY, keep=0)


def step_of(checkpoint: checkpoints.Checkpoint | None) -> int | None:
    return None if checkpoint is None else checkpoint.step


def test_rotation_keeps_the_best_one_as_well(store: Store, tmp_path: Path) -> None:
    """By steps: loss 3, 1, 2, none, and a better one that is not whole."""
    assert checkpoints.best_complete(store, "sft", KEY, "lower") is None
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None)):
        save(store, tmp_path, step, metric=loss)
    checkpoints.upload_shards(store, "sft", KEY, 50, shards(tmp_path, 0, "half"))
    assert step_of(checkpoints.best_complete(store, "sft", KEY, "lower")) == 20
    assert step_of(checkpoints.best_complete(store, "sft", KEY, "higher")) == 10
    assert checkpoints.rotate(store, "sft", KEY, keep=1, better="lower") == ["step-000030", "step-000010"]
    assert store.list_names(TOP) == ["step-000020", "step-000040", "step-000050"]
    save(store, tmp_path, 60, metric=1.0)  # equal to the best: the earlier stays
    assert checkpoints.rotate(store, "sft", KEY, keep=1, better="lower") == ["step-000050", "step-000040"]
    assert step_of(checkpoints.best_complete(store, "sft", KEY, "lower")) == 20


@pytest.mark.parametrize(
    ("max_size", "left"),
    [
        # Step n is of 2n bytes. The newest is 50, the best 20.
        (None, [20, 30, 40, 50]),
        (280, [20, 30, 40, 50]),
        (279, [20, 40, 50]),
        (219, [20, 50]),
        (1, [20, 50]),
    ],
)
def test_rotation_keeps_no_more_bytes_than_told_but_for_the_newest_and_the_best(
    store: Store, tmp_path: Path, max_size: int | None, left: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        save(store, tmp_path, step, "x" * step, metric=abs(step - 20.0))
    checkpoints.rotate(store, "sft", KEY, keep=3, max_size=max_size)
    assert store.list_names(TOP) == [f"step-{step:06d}" for step in left]


def test_a_failed_save_deletes_nothing(store: Store, tmp_path: Path) -> None:
    checkpoints.upload_shards(store, "sft", KEY, 10, shards(tmp_path, 0, "half"))
    assert checkpoints.rotate(store, "sft", KEY, keep=1) == []
    save(store, tmp_path, 20)
    checkpoints.upload_shards(store, "sft", KEY, 40, shards(tmp_path, 0, "half"))
    checkpoints.rotate(store, "sft", KEY, keep=1)
    found, skipped = checkpoints.newest_complete(store, "sft", KEY)
    assert found is not None
    assert (found.step, skipped) == (20, ["step-000040"])
    assert checkpoints.download(store, found, tmp_path / "back").is_dir()


class KilledWhileDeleting(Store):
    def delete_dir(self, path: str) -> None:
        self.delete_file(f"{path}/rank0.pt")
        raise KeyboardInterrupt


def test_a_kill_while_rotating_leaves_none_that_only_looks_whole(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, 20)
    save(store, tmp_path, 40)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.rotate(KilledWhileDeleting(store.url), "sft", KEY, keep=1)
    assert store.list_names(f"{TOP}/step-000020") == ["rank1.pt"]
    store.delete_file(f"{TOP}/step-000040/COMPLETE")
    assert checkpoints.newest_complete(store, "sft", KEY) == (None, ["step-000040", "step-000020"])
