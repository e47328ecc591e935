"""The report of pipelines with different stages, from manifests that are written here."""

import json
from pathlib import Path

import pytest

from flows.report import write_report
from rlhf_core.store.artifacts import publish
from rlhf_core.store.keys import stage_key
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store

SUPERVISED = {"eval/accuracy": 0.875, "eval_rows": 40}
PPO = {
    "exact_match/first": 0.5,
    "exact_match/last": 0.75,
    "reward/first": 0.1,
    "reward/last": 0.9,
    "parity/max": 2e-5,
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def published(store: Store, folder: Path, stage: str, metrics: dict, curve: str = "loss", inputs: tuple = ()):
    files = folder / stage
    files.mkdir()
    records = [{"step": step, "phase": "train", curve: 1.0 / step} for step in (1, 2)]
    (files / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if stage == "evaluate":
        row = {"prompt": "1+1=", "label": "2"}
        row |= {name: f"by {name}" for name in inputs} | {f"{name} exact": name != "sft" for name in inputs}
        (files / "samples.jsonl").write_text(json.dumps(row) + "\n")
    if stage == "ppo":
        steps = [(step, f"{step}#2") for step in (0, 5, 10, 15, 20)]
        rows = [{"step": n, "prompt": "1+1=", "label": "2", "response": r, "score": float(n > 5)} for n, r in steps]
        (files / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key = stage_key(stage=stage, version=1, settings={}, inputs=dict.fromkeys(inputs, "k"), data={}, code={})
    fields = {
        "stage": stage,
        "key": key.key,
        "key_source": key.source,
        "metrics": metrics,
        "inputs": key.source["inputs"],
    }
    return publish(store, local_dir=files, manifest_fields=fields, lease=None)


def report(store: Store, manifests: dict[str, Manifest]) -> tuple[str, list[str]]:
    made = write_report(store, manifests, dict.fromkeys(manifests, False), "run")
    assert store.read_bytes("reports/run/report.md").decode() == made.markdown
    return made.markdown, sorted(made.images)


def test_ppo_is_shown_before_and_after_with_the_rewards_that_it_had(store: Store, tmp_path: Path):
    process = {"reward/prm/first": 0.25, "reward/prm/last": 0.5}
    manifests = {
        "sft": published(store, tmp_path, "sft", {}),
        "prm": published(store, tmp_path, "prm", SUPERVISED, "accuracy"),
        "ppo": published(store, tmp_path, "ppo", PPO | process, "reward"),
    }
    text, images = report(store, manifests)
    assert "| greedy exact match, held out | 50.0 % | 75.0 % |" in text
    assert "| process reward model's verdict | 25.0 % | 50.0 % |" in text
    assert "reward model's score, normalised" not in text
    assert "Process reward model: 87.5 % of the steps of 40 held-out solutions judged rightly." in text
    assert "differ by at most 2.0e-05" in text
    assert images == ["ppo.png", "supervised.png"]
    assert "generations" not in text
    assert "| prompt | answer | step 0 | step 5 | step 10 | step 20 |" in text
    assert "| `1+1=` | `2` | `✗ 0#2` | `✗ 5#2` | `✓ 10#2` | `✓ 20#2` |" in text


def test_every_policy_of_the_evaluation_has_its_column(store: Store, tmp_path: Path):
    shares = {"exact_match/sft": 0.5, "exact_match/dpo": 0.625, "exact_match/kto": 0.75, "prompts": 8}
    manifests = {
        "dpo": published(store, tmp_path, "dpo", SUPERVISED, "accuracy"),
        "evaluate": published(store, tmp_path, "evaluate", shares, inputs=("sft", "kto", "dpo", "data")),
    }
    text, images = report(store, manifests)
    assert "Greedy exact match on 8 held-out prompts: sft 50.0 %, dpo 62.5 %, kto 75.0 %." in text
    assert "| prompt | answer | after SFT | after DPO | after KTO |" in text
    assert "| `1+1=` | `2` | `by sft` ✗ | `by dpo` ✓ | `by kto` ✓ |" in text
    assert "DPO: 87.5 % of 40 held-out pairs" in text
    assert "PPO" not in text
    assert images == ["supervised.png"]


def test_data_sets_alone_have_a_report_of_their_stages(store: Store, tmp_path: Path):
    manifests = {"data-sft": published(store, tmp_path, "prepare-data", {})}
    text, images = report(store, manifests)
    assert "| data-sft |" in text
    assert images == []
    assert "learned" not in text
