"""The driver as a process of its own, with the one stage that needs no engine."""

import json
import os
import subprocess
import sys

import pytest

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import first_error, read_events
from stages.plan import plan_pipeline


@pytest.fixture
def spec_of(project, tmp_path):
    def make(node="data-prompts", overrides=(), **changes):
        base = [f"run.store={tmp_path}/store", f"run.scratch={tmp_path}/scratch"]
        pipeline = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", [*base, *overrides])
        planned = next(planned for planned in plan_pipeline(pipeline) if planned.node == node)
        spec = {
            "stage": planned.stage.name,
            "node": node,
            "settings": planned.settings.model_dump(mode="json"),
            "key": planned.key.key,
            "key_source": planned.key.source,
            "inputs": {},
            "run": pipeline.run.model_dump(mode="json"),
            "scratch": f"{tmp_path}/scratch/one",
            **changes,
        }
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(spec))
        return path, planned

    return make


def run(path, module="stages.prepare_data"):
    return subprocess.run(
        [sys.executable, "-m", module, "--spec", str(path)], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_stage_runs_alone_to_a_published_artifact(spec_of, tmp_path):
    path, planned = spec_of(overrides=["data.prompts.arithmetic.rows=20"])
    done = run(path)
    assert done.returncode == 0, done.stderr
    store = Store(f"{tmp_path}/store")
    manifest = read_manifest(store, "prepare-data", planned.key.key)
    assert manifest is not None
    assert manifest.metrics == {"rows": 20, "eval_rows": 0}
    files = fetch(store, manifest, tmp_path / "out")
    rows = [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert all(eval(row["prompt"].rstrip("=")) == int(row["label"]) for row in rows)
    kinds = [event["type"] for event in read_events(tmp_path / "scratch" / "one" / "events.jsonl")]
    assert kinds == ["phase", "progress", "phase", "summary"]


def test_a_published_stage_is_not_run_again(spec_of, tmp_path):
    path, planned = spec_of(overrides=["data.prompts.arithmetic.rows=20"])
    assert run(path).returncode == 0
    first = read_manifest(Store(f"{tmp_path}/store"), "prepare-data", planned.key.key)
    assert run(path).returncode == 0
    assert read_manifest(Store(f"{tmp_path}/store"), "prepare-data", planned.key.key) == first


def fails(done, message):
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def nothing_published(tmp_path):
    return not list((tmp_path / "store").glob("artifacts/**/manifest.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"dataset": "sft", "sauce": {}}}, "data-prompts.sauce: unknown setting; did you mean 'source'?"),
        ({"stage": "sft"}, "the spec is for stage sft, and this is prepare-data; run its own module"),
        ({"surplus": 1}, "surplus: Extra inputs are not permitted"),
    ],
)
def test_bad_specs_are_one_line(spec_of, tmp_path, changes, message):
    path, _ = spec_of(**changes)
    fails(run(path), message)
    assert nothing_published(tmp_path)


def test_a_missing_and_a_broken_spec(tmp_path):
    fails(run(tmp_path / "none.json"), "does not exist; --spec wants the JSON that the workflow wrote")
    (tmp_path / "spec.json").write_text("{")
    fails(run(tmp_path / "spec.json"), "is not JSON")


def test_an_empty_data_set_and_missing_columns(spec_of, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("")
    path, _ = spec_of(overrides=[f"data.prompts={{path: {data}}}"])
    fails(run(path), f"{data} has no rows; give a file with at least one")
    data.write_text('{"question": "a", "label": "b"}\n')
    path, _ = spec_of(overrides=[f"data.prompts={{path: {data}}}"])
    fails(run(path), "has no column prompt; it has label, question")
    assert nothing_published(tmp_path)
    error = first_error(tmp_path / "scratch" / "one" / "events.jsonl")
    assert error is not None
    assert error["role"] == "driver"


def test_a_store_that_cannot_be_written(spec_of, tmp_path):
    (tmp_path / "store").write_text("a file")
    path, _ = spec_of()
    fails(run(path), "cannot be written")


def test_a_stage_that_another_run_makes_is_left_to_it(spec_of, tmp_path):
    path, planned = spec_of()
    acquire(Store(f"{tmp_path}/store"), "prepare-data", planned.key.key, {"flow_run": "other", "pid": os.getpid()}, 600)
    fails(run(path), "prepare-data")
    assert nothing_published(tmp_path)
