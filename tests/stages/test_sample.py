"""The stage sample by its driver, on an untrained policy: pairs scored by a reward model, and step labels."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reward_models import write_reward_model

from rlhf_core.config.base import key_settings, parse_settings
from rlhf_core.config.data import DataSource
from rlhf_core.config.sampling import SampleSettings
from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.loading import load_data
from rlhf_core.data.rows import read_jsonl
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.models.tokenizer import load_tokenizer, tokenizer_facts, write_stop_token_ids
from rlhf_core.store.artifacts import fetch, publish, read_manifest
from rlhf_core.store.keys import stage_key
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import read_events
from stages.contract import ContractError, check_models
from stages.inputs import code_digests

FUNCTION = "def reward_func(completion, label):\n    return len(completion) % 2\n"
PROMPTS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(6)]
# vLLM wants heads of at least 32 on the CPU. Positions are those of the reward model.
SIZES = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 64, "max_position": 32}
# An untrained model draws evenly from 32 tokens: a fifth of them end a response.
STOPS = [2, *range(26, 32)]
DRAWN = {"max_new_tokens": 16, "max_prompt_len": 10, "eval_share": 0.3, "seed": 1}
SAMPLER = {"sampler": {"dtype": "float32", "max_model_len": 32, "max_num_seqs": 32}}


class Stage:
    """Hand-made inputs in a store, and the stage on them."""

    def __init__(self, folder: Path):
        self.folder, self.store = folder, Store(f"{folder}/store")
        policy = write_scratch_model(folder / "policy", seed=0, **SIZES)
        write_stop_token_ids(policy, STOPS)
        self.facts = tokenizer_facts(load_tokenizer(policy))
        head = {"name": "score", "mean": 0.5, "std": 2.0}
        (folder / "rows").mkdir()
        (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
        self.inputs = {
            "policy": self._published("sft", self._named_model(policy, "sft"), self.facts),
            "reward": self._published(
                "rm", self._named_model(write_reward_model(folder / "rm"), "rm"), {**self.facts, "head": head}
            ),
            "prompts": self._published("prepare-data", folder / "rows", None),
        }

    def _named_model(self, model: Path, name: str) -> Path:
        shutil.copytree(model, self.folder / "artifacts" / name / "model")
        return self.folder / "artifacts" / name

    def _published(self, stage: str, files: Path, model: dict[str, Any] | None) -> Manifest:
        key = stage_key(stage=stage, version=1, settings={}, inputs={}, data={}, code={})
        fields = {"stage": stage, "key": key.key, "key_source": key.source, "model": model}
        return publish(self.store, local_dir=files, manifest_fields=fields, lease=None)

    def run(self, given: dict[str, Any], *inputs: str) -> tuple[Manifest, Path, str]:
        """(manifest, files, what the UI is shown)."""
        settings = parse_settings(SampleSettings, {**DRAWN, **SAMPLER, **given})
        keys = {name: self.inputs[name].key for name in inputs}
        key = stage_key(
            stage="sample",
            version=1,
            settings=key_settings(settings),
            inputs=keys,
            data={},
            code=code_digests("sample", settings),
        )
        scratch = self.folder / "scratch" / settings.form
        spec = {
            "stage": "sample",
            "node": "sample",
            "settings": settings.model_dump(mode="json"),
            "key": key.key,
            "key_source": key.source,
            "inputs": {name: self.inputs[name].model_dump(mode="json") for name in inputs},
            "run": {"store": self.store.url, "scratch": f"{self.folder}/scratch"},
            "scratch": str(scratch),
        }
        path = self.folder / f"{settings.form}.json"
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "stages.sample", "--spec", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        manifest = read_manifest(self.store, "sample", key.key)
        assert manifest is not None
        shown = next(one["markdown"] for one in read_events(scratch / "events.jsonl") if one["type"] == "summary")
        return manifest, fetch(self.store, manifest, self.folder / "out" / settings.form), shown


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("sample"))


def parts(files: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and held-out rows, once it is seen that a prompt is on one side."""
    rows, held_out = read_jsonl(files / "rows.jsonl"), read_jsonl(files / "eval.jsonl")
    assert rows
    assert held_out
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    return rows, held_out


@pytest.mark.engines
def test_pairs_by_a_reward_model_are_read_like_any_data_set(stage: Stage) -> None:
    given = {"form": "pairs", "samples_per_prompt": 6, "pairs": {"which": "all", "max_per_prompt": 2}}
    scored = {"reward": {"rm": 1.0}, "scorer": {"dtype": "float32", "batch_size": 4}}
    manifest, files, shown = stage.run({**given, **scored}, "policy", "reward", "prompts")
    rows, held_out = parts(files)
    metrics = manifest.metrics
    assert (metrics["prompts"], metrics["samples"]) == (30, 180)
    assert (metrics["rows"], metrics["eval_rows"]) == (len(rows), len(held_out))
    assert 0 < metrics["samples_truncated"] < 90  # type: ignore[operator]
    assert metrics["reward/best"] > metrics["reward"] == pytest.approx(metrics["reward/rm"])  # type: ignore[operator]
    assert "reward/exact" in metrics  # measured at weight 0
    assert all(row["margin"] > 0 and row["chosen"] != row["rejected"] for row in [*rows, *held_out])
    assert max(sum(row["prompt"] == one["prompt"] for row in rows) for one in rows) == 2

    source = DataSource.model_validate({"path": f"{files}/rows.jsonl", "eval_path": f"{files}/eval.jsonl"})
    read = load_data("pairs", source)
    assert (read.rows, read.held_out) == (rows, held_out)
    encoder = Encoder(load_tokenizer(stage.folder / "policy"), TextSettings(), 64)
    assert encoder.pairs(rows, margin=True).items

    report = json.loads((files / "data_report.json").read_text())
    assert (report["dataset"], report["example"]) == ("pairs", rows[0])
    assert {path.name for path in (files / "plots").iterdir()} == {"lengths.png", "rewards.png"}
    assert f"{len(rows)} rows, {len(held_out)} held out, of 180 samples of 30 prompts" in shown


@pytest.mark.engines
def test_step_labels_are_what_completions_reach(stage: Stage) -> None:
    (stage.folder / "reward.py").write_text(FUNCTION)
    given = {
        "form": "steps",
        "samples_per_prompt": 8,
        "steps": {"completions": 4, "labels": "soft", "separator": "3", "right_at": 1.0},
        "reward": {"functions": [{"path": f"{stage.folder}/reward.py", "name": "odd"}], "sandbox": {"workers": 1}},
    }
    manifest, files, _ = stage.run(given, "policy", "prompts")
    rows = [row for part in parts(files) for row in part]
    metrics = manifest.metrics
    # Four of each beginning; some of them belong to several solutions.
    assert metrics["completions"] % 4 == 0  # type: ignore[operator]
    assert 0 < metrics["completions"] <= 4 * metrics["steps"]  # type: ignore[operator]
    assert all(
        len(row["steps"]) == len(row["labels"]) and not any("3" in step for step in row["steps"]) for row in rows
    )
    # Quarters; whole numbers at the end of a finished solution, which is as right as the solution.
    assert {label for row in rows for label in row["labels"]} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {row["labels"][-1] for row in rows} >= {0.0, 1.0}
    assert metrics["steps"] >= sum(len(row["steps"]) for row in rows)  # type: ignore[operator]
    # Both phases are kept for a restart.
    kept = stage.store.list_names(f"training/sample/{manifest.key}/samples")
    assert {name.partition("-")[0] for name in kept} == {"sampling", "completing"}


def test_models_that_do_not_fit_are_refused_before_an_engine_starts(stage: Stage, tmp_path: Path) -> None:
    inputs = {name: stage.folder / "artifacts" / name for name in ("sft", "rm")}
    paths = {"policy": inputs["sft"], "reward": inputs["rm"]}
    given = {name: stage.inputs[name] for name in paths}
    lengths = {"policy": ("a", 32), "reward": ("sample.max_prompt_len + max_new_tokens", 32)}
    check_models(given, paths, lengths)
    with pytest.raises(ContractError, match=r"^sample\.max_prompt_len \+ max_new_tokens 33 is above max_position_emb"):
        check_models(given, paths, {**lengths, "reward": ("sample.max_prompt_len + max_new_tokens", 33)})
    other = given["reward"].model_copy(update={"model": {**stage.facts, "eos_token_id": 9}})
    with pytest.raises(ContractError, match="differ in eos_token_id"):
        check_models({**given, "reward": other}, paths, lengths)
    headless = given["reward"].model_copy(update={"model": stage.facts})
    with pytest.raises(ContractError, match="has no score head"):
        check_models({**given, "reward": headless}, paths, lengths)
