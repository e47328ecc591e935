"""The whole chain on real engines, small: server, pools, workers, DeepSpeed, Ray, vLLM, artifacts on S3 (moto).

One chain serves all tests of this file, in order: it is killed in PPO and retried, run again, then run twice at once
with a changed setting.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from logged_metrics import without_times
from moto.server import ThreadedMotoServer
from rich.console import Console

from flows import services
from flows.api import Api
from flows.follow import FINAL_STATES, NodeView, RunView, follow
from rlhf_core.cluster.leftovers import attempt_name, leftovers
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import artifact_path, fetch, read_manifest
from rlhf_core.store.keys import stage_key
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import PlannedStage, plan_pipeline

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"
BUCKET, REGION = "rlhf-chain", "eu-west-1"
NODES = ["data-sft", "data-pairs", "data-steps", "data-prompts", "data-eval", "sft", "rm", "ppo", "evaluate"]
SMALL = [
    "data.sft.arithmetic={rows: 64, eval_rows: 10}",
    "data.pairs.arithmetic={rows: 64, eval_rows: 20}",
    "data.steps.arithmetic={rows: 20}",
    "data.prompts.arithmetic={rows: 40}",
    "data.eval.arithmetic={rows: 20}",
    "sft.max_steps=6",
    "sft.batch_size=16",
    "rm.max_steps=6",
    "rm.batch_size=16",
    "ppo.rollout.prompts=8",
    "ppo.rollout.samples_per_prompt=2",
    "ppo.batch_size=8",
    "ppo.steps=6",
    "ppo.critic.warmup_steps=1",
    "ppo.eval_steps=3",
    "ppo.trainer={ranks: 2, zero_stage: 2, micro_batch_size: 4, save_steps: 2}",
    "run.tracking={tensorboard: true, wandb_project: chain-test}",
]


@dataclass
class Chain:
    project: Path
    running: services.Services
    api: Api
    overrides: list[str]

    @property
    def store(self) -> Store:
        return Store(self.plan()["ppo"][1])

    def plan(self, *more: str) -> dict[str, tuple[PlannedStage, str]]:
        settings = load_pipeline(DEMO, [*self.overrides, *more])
        return {planned.node: (planned, settings.run.store) for planned in plan_pipeline(settings)}

    def manifest(self, node: str, *more: str) -> Manifest | None:
        planned, store = self.plan(*more)[node]
        return read_manifest(Store(store), planned.stage.name, planned.key.key)

    def start(self, *more: str) -> str:
        deployment = self.api.get("/deployments/name/sft-rm-ppo/demo")
        body = {"parameters": {"set": [*self.overrides, *more]}, "state": {"type": "SCHEDULED"}}
        return self.api.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]

    def wait(self, run: str) -> dict[str, Any]:
        view = RunView(run, {node: NodeView() for node in NODES})
        return follow(self.api, view, Console(quiet=True), lambda: None)

    def children(self, run: str) -> list[dict[str, Any]]:
        return self.api.flow_runs(tags={"all_": [f"parent:{run}"]})

    def driver_logs(self, node: str, *more: str) -> list[str]:
        """One name for each time that a driver ran for this node's key."""
        planned, store = self.plan(*more)[node]
        return Store(store).list_names(f"training/{planned.stage.name}/{planned.key.key}/logs")

    def lines(self, manifest: Manifest, file: str) -> list[dict[str, Any]]:
        path = f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}/{file}"
        return [json.loads(line) for line in self.store.read_bytes(path).decode().splitlines()]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket on loopback; the environment of this process, and so of the workers, points to it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-no-artifact-may-hold")
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        yield f"s3://{BUCKET}/store"
    server.stop()


@pytest.fixture(scope="module")
def chain(
    s3: str, tmp_path_factory: pytest.TempPathFactory, start_services: Callable[[Path], services.Services]
) -> Iterator[Chain]:
    project = tmp_path_factory.mktemp("chain")
    running = start_services(project)
    try:
        services.wait_workers(services.Place(project), running)
        with Api(running.api_url) as api:
            overrides = [*SMALL, f"run.store={s3}", f"run.scratch={project / 'scratch'}"]
            yield Chain(project, running, api, overrides)
    finally:
        services.down(project)


@pytest.fixture(scope="module")
def killed_and_retried(chain: Chain) -> str:
    """The parent's run id. Its PPO stage is killed after the third step and the parent retried as the UI does it."""
    run = chain.start()
    kill_when(chain, "ppo", step=3)
    ended = chain.wait(run)
    assert ended["state_type"] == "FAILED", ended["state"]
    assert ended["state"]["message"].startswith("ppo: ")
    assert chain.manifest("ppo") is None
    time.sleep(5)  # Prefect's worker reports the old process's exit code for about two seconds
    chain.api.set_state(run, "SCHEDULED", "AwaitingRetry", "Retry from the UI", force=True)
    wait_until(lambda: chain.api.flow_run(run)["state_type"] not in FINAL_STATES)
    ended = chain.wait(run)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    return run


def wait_until(condition: Callable[[], Any], limit_s: float = 800) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise TimeoutError("what the test waits for did not happen")


def events_of(chain: Chain, node: str) -> list[Path]:
    return sorted((chain.project / "scratch").glob(f"{node}-*/*/events.jsonl"), key=lambda path: path.stat().st_mtime)


def kill_when(chain: Chain, node: str, step: int) -> None:
    """SIGKILLs the stage's flow process (the supervisor), found among the descendants of this chain's workers."""
    mark = f'"type": "progress", "step": {step},'
    wait_until(lambda: any(mark in path.read_text() for path in events_of(chain, node)))
    scratch = str(events_of(chain, node)[-1].parent)
    worker = psutil.Process(chain.running.processes["worker-gpu"].pid)
    below = worker.children(recursive=True)
    driver = next(process for process in below if f"{scratch}/spec.json" in process.cmdline())
    supervisor = next(process for process in driver.parents() if process.ppid() == worker.pid)
    assert [path.parent for path in leftovers(attempt_name(Path(scratch)))][-1:] == [Path("/tmp")]
    supervisor.kill()
    _, alive = psutil.wait_procs([supervisor, driver], timeout=30)
    assert not alive, f"the driver outlived its supervisor: {alive}"
    # The guardian goes last, when it has removed what the attempt made.
    attempt = Path(scratch)
    wait_until(lambda: len(list(attempt.iterdir())) <= 3, limit_s=30)
    assert sorted(path.name for path in attempt.iterdir()) == ["driver.log", "events.jsonl", "spec.json"]
    assert leftovers(attempt_name(attempt)) == []


def test_a_killed_stage_goes_on_from_its_newest_training_checkpoint(chain: Chain, killed_and_retried: str):
    phases = [
        [json.loads(line) for line in path.read_text().splitlines() if '"phase"' in line and '"resumed"' in line]
        for path in events_of(chain, "ppo")
    ]
    assert [[event["step"] for event in attempt] for attempt in phases] == [[], [2]]
    manifest = chain.manifest("ppo")
    assert manifest is not None
    steps = [record["step"] for record in chain.lines(manifest, "metrics.jsonl") if record["phase"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]
    # Nothing that was complete ran again.
    assert {node: len(chain.driver_logs(node)) for node in NODES if node != "ppo"} == {
        node: 1 for node in NODES if node != "ppo"
    }


def test_a_killed_and_resumed_run_has_the_bits_of_one_that_was_not_killed(
    chain: Chain, killed_and_retried: str, tmp_path: Path
):
    """PPO again under a salted key: same settings, same inputs, nothing in the store to go on from."""
    planned, _ = chain.plan()["ppo"]
    source = {name: planned.key.source[name] for name in ("stage", "version", "settings", "inputs", "data", "code")}
    key = stage_key(**source, salt="uninterrupted")
    inputs = {name: chain.manifest(node) for name, node in planned.inputs.items()}
    spec = {
        "stage": "ppo",
        "node": "ppo",
        "settings": planned.settings.model_dump(mode="json"),
        "key": key.key,
        "key_source": key.source,
        "inputs": {name: manifest.model_dump(mode="json") for name, manifest in inputs.items() if manifest},
        "run": load_pipeline(DEMO, chain.overrides).run.model_dump(mode="json"),
        "scratch": str(tmp_path / "scratch"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "stages.ppo", "--spec", str(tmp_path / "spec.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    straight, resumed = read_manifest(chain.store, "ppo", key.key), chain.manifest("ppo")
    assert straight is not None
    assert resumed is not None
    assert straight.content_digest == resumed.content_digest
    timeless = [
        [without_times(record) for record in chain.lines(manifest, "metrics.jsonl")] for manifest in (straight, resumed)
    ]
    assert timeless[0] == timeless[1]
    assert chain.lines(straight, "samples.jsonl") == chain.lines(resumed, "samples.jsonl")


def test_sampler_and_trainer_agree_after_every_transfer(chain: Chain, killed_and_retried: str):
    manifest = chain.manifest("ppo")
    assert manifest is not None
    train = [r for r in chain.lines(manifest, "metrics.jsonl") if r["phase"] == "train"]
    assert all(record["parity/max"] < 1e-3 for record in train)
    # One step of the critic alone; then every step sends other weights, and the policy leaves its reference.
    assert ["policy/grad_norm" in record for record in train] == [False, True, True, True, True, True]
    assert [record["kl"] != 0.0 for record in train] == [False, False, True, True, True, True]


def test_the_artifacts_load_as_what_they_are(chain: Chain, killed_and_retried: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    classes = {
        "sft": AutoModelForCausalLM,
        "rm": AutoModelForSequenceClassification,
        "ppo": AutoModelForCausalLM,
    }
    for node, model_class in classes.items():
        manifest = chain.manifest(node)
        assert manifest is not None
        directory = fetch(chain.store, manifest, tmp_path / node) / "model"
        model, info = model_class.from_pretrained(directory, output_loading_info=True)
        assert not info["missing_keys"], node
        assert not info["unexpected_keys"], node
        assert model.config.num_labels == 1 or node != "rm"
        assert AutoTokenizer.from_pretrained(directory).chat_template
        assert (tmp_path / node / "plots").is_dir()
        assert list((tmp_path / node).glob("wandb/offline-run-*/*.wandb"))
        assert list((tmp_path / node / "tensorboard").iterdir())
    for file in tmp_path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"a-secret-that-no-artifact-may-hold" not in content, file
        assert "wandb" not in file.parts or str(chain.project).encode() not in content, file


def test_everything_is_shown_in_the_ui(chain: Chain, killed_and_retried: str):
    def artifacts(run: str) -> dict[str, list[dict[str, Any]]]:
        found = chain.api.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {kind: [a for a in found if a["type"] == kind] for kind in ("markdown", "progress", "image")}

    for child in chain.children(killed_and_retried):
        if child["state_type"] == "COMPLETED":
            shown = artifacts(child["id"])
            assert len(shown["markdown"]) == 1, child["name"]
            assert [progress["data"] for progress in shown["progress"]] == [100.0], child["name"]
    report = artifacts(killed_and_retried)["markdown"]
    assert len(report) == 1
    text = chain.store.read_bytes(f"reports/{killed_and_retried}/report.md").decode()
    assert "greedy exact match, held out" in text
    assert "10 generations" in text
    assert all(f"| {node} |" in text for node in NODES)
    assert len(artifacts(killed_and_retried)["image"]) == 2


def test_the_same_again_starts_no_process(chain: Chain, killed_and_retried: str):
    """By the plain `prefect` command, which prefect.toml points at this server."""
    before = {run["id"] for run in chain.api.flow_runs()}
    command = [str(Path(sys.executable).parent / "prefect"), "deployment", "run", "sft-rm-ppo/demo", "--watch"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [*command, "-p", f"set={json.dumps(chain.overrides)}"],
        cwd=chain.project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (new,) = [run for run in chain.api.flow_runs() if run["id"] not in before]
    assert new["state"]["message"] == "0 artifacts made, 9 reused"


def test_rlhf_run_prints_the_report(chain: Chain, killed_and_retried: str):
    sets = [word for override in chain.overrides for word in ("--set", override)]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "rlhf"), "run", str(DEMO), *sets],
        cwd=chain.project,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What was learned" in done.stdout
    assert "0 artifacts made, 9 reused" in " ".join(done.stdout.split())


def test_two_runs_at_once_with_a_changed_setting_make_ppo_and_evaluate_once(chain: Chain, killed_and_retried: str):
    change = "ppo.algorithm.kl.coef=0.3"
    old = chain.manifest("ppo")
    runs = [chain.start(change), chain.start(change)]
    assert [chain.wait(run)["state_type"] for run in runs] == ["COMPLETED", "COMPLETED"]
    assert {node: len(chain.driver_logs(node, change)) for node in ("sft", "rm", "ppo", "evaluate")} == {
        "sft": 1,
        "rm": 1,
        "ppo": 1,
        "evaluate": 1,
    }
    new = chain.manifest("ppo", change)
    assert old is not None
    assert new is not None
    assert old.content_digest != new.content_digest
    assert old.inputs == new.inputs
