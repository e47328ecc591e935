"""SFT and reward-model trainers as a stage has them: data and models from the store, on real ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.supervised import RmSettings, SftSettings
from rlhf_core.config.training import ModelSource, OptimizerSettings, TrainerSettings
from rlhf_core.store.artifacts import publish
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.leases import acquire
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.training.rank import Job

pytestmark = pytest.mark.engines

SUMS = [(a, b) for a in range(1, 10, 2) for b in range(1, 10, 3)]  # 15 rows
SFT_ROWS = [{"prompt": f"{a}+{b}=", "response": f"{a}+{b}={a + b}#{a + b}"} for a, b in SUMS]
PAIR_ROWS = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a}{b}{a + b + 1}"} for a, b in SUMS]
HELD_OUT = 5


def publish_files(store: Store, stage: str, directory: Path) -> Manifest:
    source: dict[str, Any] = {"stage": stage, "directory": directory.name}
    fields = {"stage": stage, "key": sha256_text(canonical_json(source)), "key_source": source}
    return publish(store, local_dir=directory, manifest_fields=fields, lease=None)


@pytest.fixture
def job_of(tmp_path: Path, llama: str) -> Any:
    """(stage, ranks, zero_stage) -> the job of an SFT or RM trainer; held-out rows are 5, the training rows 10."""

    def make(stage: str, ranks: int, zero_stage: int = 2) -> Job:
        root = tmp_path / f"{stage}-{ranks}-{zero_stage}"
        store = Store(str(root / "store"))
        data = root / "data"
        data.mkdir(parents=True)
        rows = SFT_ROWS if stage == "sft" else PAIR_ROWS
        long = dict.fromkeys(rows[0], "1" * 41)  # above max_len
        for name, part in (("rows.jsonl", [*rows[HELD_OUT:], long, long]), ("eval.jsonl", [*rows[:HELD_OUT], long])):
            (data / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        manifests = {"data": publish_files(store, "prepare-data", data)}
        common: dict[str, Any] = {
            "optimizer": OptimizerSettings(lr=3e-3),
            "batch_size": 4,
            "max_len": 40,
            "max_steps": 8,
            "dtype": "float32",
            "trainer": TrainerSettings(ranks=ranks, zero_stage=zero_stage, micro_batch_size=2),
        }
        if stage == "rm":
            shutil.copytree(llama, root / "sft" / "model")
            manifests["model"] = publish_files(store, "sft", root / "sft")
            settings: Any = RmSettings(**common)
        else:
            settings = SftSettings(model=ModelSource(path=llama), **common)
        (root / "scratch").mkdir()
        lease = acquire(store, stage, "a" * 64, {"test": True}, 3600)
        return Job(stage, "a" * 64, settings, store.url, lease.n, str(root / "scratch"), manifests)

    return make


@pytest.mark.parametrize(("stage", "trainer"), [("sft", "SftTrainer"), ("rm", "RmTrainer")])
def test_evaluation_and_steps_do_not_depend_on_ranks(groups: Any, job_of: Any, stage: str, trainer: str) -> None:
    """5 rows on 2 ranks want a fill row, in micro-batches of 2 and 1: it has no weight."""
    cuts = [(1, 2), (2, 2), (2, 3)]
    one, *others = [
        groups[ranks].run("supervised", trainer=trainer, job=job_of(stage, ranks, zero), train_steps=4)
        for ranks, zero in cuts
    ]
    counts = one[0]["counts"]
    assert (counts["kept"], counts["dropped_too_long"]) == (10, 2)
    assert (counts["eval_rows"], counts["eval_dropped_too_long"]) == (HELD_OUT, 1)
    for two in others:
        assert two[0] == two[1]
        for moment in ("before", "after"):
            assert two[0][moment].keys() == one[0][moment].keys()
            assert two[0][moment] == pytest.approx(one[0][moment], rel=2e-4, abs=1e-5), moment
        for step, same in zip(two[0]["steps"], one[0]["steps"], strict=True):
            assert step == pytest.approx(same, rel=2e-4, abs=1e-5)
    assert one[0]["after"]["loss"] < one[0]["before"]["loss"]


def test_trainer_goes_on_from_the_store_to_the_bit(groups: Any, job_of: Any) -> None:
    """3 steps of 4 rows end in the second epoch of 10 rows: the position is part of it."""
    done = groups[2].run("trainer_resume", job=job_of("sft", 2), before=3, after=3)
    for rank in done:
        assert rank["position"] == 12
        assert rank["resumed"] == rank["straight"]
        assert rank["resumed_digest"] == rank["straight_digest"]
    assert len(set(done[0]["straight"])) == 6
