"""The driver as a process of its own, up to where a stage would start its engines."""

import json
import os
import subprocess
import sys

import pytest

from rlhf_core.cluster.session import ClusterError
from rlhf_core.config.data import PrepareDataSettings
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.data.errors import TokenError
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.artifacts import fetch, publish, read_manifest
from rlhf_core.store.checkpoints import Shards, complete
from rlhf_core.store.keys import stage_key
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import EventLog, first_error, read_events
from rlhf_core.training.progress import ResumeError
from stages import runner
from stages.definition import Stage, StageResult
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
    assert (manifest.metrics["rows"], manifest.metrics["eval_rows"], manifest.metrics["rows_dropped"]) == (20, 0, 0)
    files = fetch(store, manifest, tmp_path / "out")
    rows = [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert all(eval(row["prompt"].rstrip("=")) == int(row["label"]) for row in rows)
    kinds = [event["type"] for event in read_events(tmp_path / "scratch" / "one" / "events.jsonl")]
    assert kinds == ["phase", "metrics", "progress", "phase", "summary"]
    recorded = json.loads((files / "metrics.jsonl").read_text())
    assert recorded == {"step": 0, "phase": "data", **manifest.metrics}


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
    fails(run(path), "fits no shape of this data set")
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


def test_what_an_earlier_attempt_left_in_the_same_scratch_is_not_this_ones(spec_of, tmp_path):
    path, planned = spec_of(overrides=["data.prompts.arithmetic.rows=20"])
    scratch = tmp_path / "scratch" / "one"
    EventLog(scratch / "events.jsonl").error(RuntimeError("of the attempt before"), "trainer", 0)
    for name in ("artifact/metrics.jsonl", "artifact/stray.txt", "inputs/x/y", "base-0/config.json"):
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_text("{}\n")
    assert run(path).returncode == 0
    store = Store(f"{tmp_path}/store")
    manifest = read_manifest(store, "prepare-data", planned.key.key)
    assert manifest is not None
    assert "stray.txt" not in manifest.files
    assert len((fetch(store, manifest, tmp_path / "out") / "metrics.jsonl").read_text().splitlines()) == 1
    assert first_error(scratch / "events.jsonl") is None
    assert [child.name for child in scratch.iterdir()] == ["events.jsonl"]


def test_data_that_changed_since_it_was_planned_is_refused(spec_of, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "2"}\n')
    path, _ = spec_of(overrides=[f"data.prompts={{path: {data}}}"])
    data.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label": "3"}\n')
    fails(run(path), "data.prompts.path is not what this run was planned with")
    assert nothing_published(tmp_path)


SIZES = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16, "max_position": 32}


def test_a_base_model_that_changed_since_it_was_planned_is_refused(spec_of, tmp_path):
    base = write_scratch_model(tmp_path / "base", seed=0, **SIZES)
    path, _ = spec_of("sft", [f"sft.model={{path: {base}}}"])
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    fails(run(path, "stages.sft"), "sft.model is not what this run was planned with")
    assert nothing_published(tmp_path)


@pytest.fixture
def ppo_inputs(tmp_path):
    """Manifests of hand-made inputs: an untrained policy, the same as a reward model, one prompt."""
    store = Store(f"{tmp_path}/store")

    def published(name, files, model=None):
        key = stage_key(stage=name, version=1, settings={}, inputs={}, data={}, code={})
        fields = {"stage": name, "key": key.key, "key_source": key.source, "model": model}
        return publish(store, local_dir=files, manifest_fields=fields, lease=None).model_dump(mode="json")

    base = write_scratch_model(tmp_path / "made" / "model", seed=0, **SIZES).parent
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    rows = published("prepare-data", tmp_path / "rows")
    head = {"name": "score", "mean": 0.0, "std": 1.0}
    return {
        "policy": published("sft", base, {}),
        "reward": published("rm", base, {"head": head}),
        "prompts": rows,
        "eval": rows,
    }


FITTING = ["ppo.rollout.max_prompt_len=8", "ppo.rollout.max_new_tokens=8"]


# <s> <|user|> 1 + 1 = <|end|> <|assistant|> is 8 tokens.
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"prompt": 7, "new": 8, "model": 32}, "all 1 prompts are longer than max_prompt_len 7 tokens"),
        (
            {"prompt": 8, "new": 8, "model": 33},
            "ppo.sampler.max_model_len 33 is above max_position_embeddings 32 of policy (sft/",
        ),
    ],
)
def test_ppo_refuses_what_does_not_fit_before_an_engine_starts(spec_of, ppo_inputs, tmp_path, lengths, message):
    overrides = [
        f"ppo.rollout.max_prompt_len={lengths['prompt']}",
        f"ppo.rollout.max_new_tokens={lengths['new']}",
        f"ppo.sampler.max_model_len={lengths['model']}",
    ]
    path, planned = spec_of("ppo", overrides, inputs=ppo_inputs)
    fails(run(path, "stages.ppo"), message)
    assert read_manifest(Store(f"{tmp_path}/store"), "ppo", planned.key.key) is None
    names = [e.get("name") for e in read_events(tmp_path / "scratch" / "one" / "events.jsonl")]
    assert "starting ranks and sampler" not in names


def test_ppo_refuses_a_training_checkpoint_of_another_layout_before_an_engine_starts(spec_of, ppo_inputs, tmp_path):
    path, planned = spec_of("ppo", ["ppo.sampler.max_model_len=32", *FITTING], inputs=ppo_inputs)
    extra = {"layout": {"ranks": 4, "zero_stage": 3, "tensor_parallel": 1, "optimizer": "adamw"}}
    complete(Store(f"{tmp_path}/store"), "ppo", planned.key.key, 20, Shards({"model": "0" * 64}, 1), extra, lease=None)
    fails(run(path, "stages.ppo"), "was written with trainer.ranks 4, ZeRO stage 3")


def drive(spec_path, monkeypatch, work):
    """Runs the driver in this process with `work` as the stage's function; returns its exit code."""
    stage = Stage("prepare-data", 1, "stages.prepare_data", PrepareDataSettings, "cpu", work)
    monkeypatch.setattr(sys, "argv", ["stage", "--spec", str(spec_path)])
    with pytest.raises(SystemExit) as ended:
        runner.main(stage)
    return ended.value.code


def test_the_driver_gives_its_account_beside_that_of_a_rank(spec_of, tmp_path, monkeypatch):
    def work(context) -> StageResult:
        context.events.error(RuntimeError("gloo: connection reset"), "trainer", 0)
        raise ClusterError("trainer: a rank's process ended during train, killed from outside or out of memory")

    path, _ = spec_of()
    assert drive(path, monkeypatch, work) == 2
    errors = [e for e in read_events(tmp_path / "scratch" / "one" / "events.jsonl") if e["type"] == "error"]
    assert [(e["role"], e["kind"]) for e in errors] == [("trainer", "RuntimeError"), ("driver", "ClusterError")]
    assert errors[1]["message"].startswith("trainer: a rank's process ended")


@pytest.mark.parametrize("error", [TokenError, ResumeError, ClusterError])
def test_an_error_of_the_users_is_one_line(spec_of, monkeypatch, capsys, error):
    def work(_) -> StageResult:
        raise error("what was given,\n  what to do")

    path, _ = spec_of()
    assert drive(path, monkeypatch, work) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: what was given, what to do"


def test_the_commit_is_that_of_our_checkout_and_not_of_a_repository_around_it(tmp_path, monkeypatch):
    def git(*arguments):
        author = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        done = subprocess.run(["git", *author, "-C", str(tmp_path), *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "the user's")
    for place, expected in (("stages", git("rev-parse", "HEAD")), (".venv/site-packages/stages", None)):
        (tmp_path / place).mkdir(parents=True)
        monkeypatch.setattr(runner, "__file__", str(tmp_path / place / "runner.py"))
        assert runner._git_commit() == expected
