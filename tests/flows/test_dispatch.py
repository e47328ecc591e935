"""Who trains a stage: the lease, the manifest, and what the parent says about a child that failed."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.dispatch import cause
from flows.processes import identify
from flows.sft_rm_ppo import resolve, waits_for
from flows.stage_flow import _Run, claim, lease_owner
from flows.supervisor import StageStopped, attempt_scratch
from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import RunSettings, load_pipeline, read_pipeline
from rlhf_core.store import leases
from rlhf_core.store.artifacts import publish
from rlhf_core.store.keys import StageKey, stage_key
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline
from stages.spec import StageSpec

logger = logging.getLogger(__name__)
DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"


@pytest.fixture
def key() -> StageKey:
    return stage_key(stage="sft", version=1, settings={}, inputs={}, data={}, code={})


@pytest.fixture
def run(tmp_path: Path, key: StageKey) -> _Run:
    store = Store(str(tmp_path / "store"))
    spec = StageSpec(
        stage="sft",
        node="sft",
        settings={},
        key=key.key,
        key_source=key.source,
        inputs={},
        run=RunSettings(store=store.url, scratch=str(tmp_path / "scratch")),
    )
    return _Run(spec, store, flow_run="11111111-1111-1111-1111-111111111111", run_count=1)


def publish_rows(run: _Run, folder: Path) -> None:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("{}\n")
    fields = {"stage": "sft", "key": run.spec.key, "key_source": run.spec.key_source}
    publish(run.store, local_dir=folder, manifest_fields=fields, lease=None)


def test_a_free_stage_is_claimed_and_the_owner_is_this_process(run: _Run):
    lease = claim(run, logger, lambda: False)
    assert isinstance(lease, leases.Lease)
    held = leases.holder(run.store, "sft", run.spec.key)
    assert held is not None
    assert (held.owner["flow_run"], held.owner["pid"]) == (run.flow_run, os.getpid())


def test_a_published_stage_is_not_claimed_and_its_lease_is_free(run: _Run, tmp_path: Path):
    publish_rows(run, tmp_path / "out")
    assert isinstance(claim(run, logger, lambda: False), Manifest)
    held = leases.holder(run.store, "sft", run.spec.key)
    assert held is not None
    assert not held.alive


def test_the_lease_of_a_killed_supervisor_on_this_machine_is_taken_at_once(run: _Run):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    identity = identify(child.pid)
    assert identity is not None
    owner = lease_owner("another") | {"pid": identity.pid, "started": identity.started}
    leases.acquire(run.store, "sft", run.spec.key, owner, ttl_s=3600)
    child.kill()
    child.wait()
    lease = claim(run, logger, lambda: False)
    assert isinstance(lease, leases.Lease)
    assert lease.n == 2


def test_of_two_runs_that_find_a_dead_owner_the_slower_waits(run: _Run, monkeypatch: pytest.MonkeyPatch):
    dead = leases.acquire(run.store, "sft", run.spec.key, lease_owner("dead"), ttl_s=3600)

    def rival_is_quicker(process: object) -> bool:
        """The owner is found dead, and before this run acts on it another has."""
        dead.release()
        leases.acquire(run.store, "sft", run.spec.key, {"flow_run": "rival"}, ttl_s=3600)
        return False

    def rival_ends(seconds: float) -> None:
        held = leases.holder(run.store, "sft", run.spec.key)
        assert held is not None
        assert held.owner == {"flow_run": "rival"}
        leases.attach(run.store, "sft", run.spec.key, held.n).release()

    monkeypatch.setattr("flows.stage_flow.alive", rival_is_quicker)
    monkeypatch.setattr("flows.stage_flow.time.sleep", rival_ends)
    lease = claim(run, logger, lambda: False)
    assert isinstance(lease, leases.Lease)
    assert lease.n == 3


def test_attempts_of_runs_that_were_created_together_have_directories_of_their_own():
    first, second = "0197c2f4-8a11-7b6e-9d2c-1f2e3d4c5b6a", "0197c2f4-8a12-7c01-8e5f-6a7b8c9d0e1f"
    assert attempt_scratch("s", "sft", "k", first, 1) != attempt_scratch("s", "sft", "k", second, 1)
    assert attempt_scratch("s", "sft", "k", first, 1) != attempt_scratch("s", "sft", "k", first, 2)


@pytest.mark.parametrize("owner", [{"flow_run": "by hand"}, {"pid_space": "another machine", "pid": 1, "started": 1}])
def test_a_live_lease_is_waited_for_until_the_artifact_is_there(
    run: _Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: dict
):
    leases.acquire(run.store, "sft", run.spec.key, owner, ttl_s=3600)
    # What the holder does while this run waits.
    monkeypatch.setattr("flows.stage_flow.time.sleep", lambda seconds: publish_rows(run, tmp_path / "out"))
    assert isinstance(claim(run, logger, lambda: False), Manifest)
    held = leases.holder(run.store, "sft", run.spec.key)
    assert held is not None
    assert (held.n, held.alive) == (1, True)


def test_a_live_process_of_this_machine_keeps_its_lease(run: _Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leases.acquire(run.store, "sft", run.spec.key, lease_owner("another"), ttl_s=3600)
    monkeypatch.setattr("flows.stage_flow.time.sleep", lambda seconds: publish_rows(run, tmp_path / "out"))
    assert isinstance(claim(run, logger, lambda: False), Manifest)


def test_a_run_that_is_cancelled_does_not_wait_on(run: _Run):
    leases.acquire(run.store, "sft", run.spec.key, {"flow_run": "another"}, ttl_s=3600)
    with pytest.raises(StageStopped):
        claim(run, logger, lambda: True)


def test_every_stage_waits_for_all_data_and_data_for_nothing():
    plan = plan_pipeline(load_pipeline(DEMO))
    data = {planned.node for planned in plan if planned.node.startswith("data-")}
    waits = {planned.node: set(waits_for(planned, plan)) for planned in plan}
    assert waits == {node: set() for node in data} | {
        "sft": data,
        "rm": data | {"sft"},
        "ppo": data | {"sft", "rm"},
        "evaluate": data | {"sft", "ppo"},
    }


def test_overrides_are_merged_last():
    given = read_pipeline(DEMO)
    assert resolve(given, ["ppo.optimizer.lr=1e-6"]).ppo.optimizer.lr == 1e-6


def test_a_partial_stage_shows_set_in_one_line():
    given = read_pipeline(DEMO) | {"ppo": {"steps": 3}}
    with pytest.raises(SettingsError) as raised:
        resolve(given, [])
    assert "ppo.optimizer: missing" in str(raised.value)
    assert "set, e.g. -p 'set=[\"ppo.optimizer.lr=1e-6\"]'" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Failed(message="policy rank 1: ValueError:\nreward is NaN"), "policy rank 1: ValueError: reward is NaN"),
        (Crashed(message="exit code -9"), "its run sft-1 is Crashed: exit code -9"),
        (Cancelled(), "its run sft-1 is Cancelled: no cause given"),
        (Completed(), "its run sft-1 completed, but its manifest is not in the store"),
    ],
)
def test_the_cause_is_one_line(state, expected: str):
    assert cause("sft-1", state) == expected
