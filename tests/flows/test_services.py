"""`rlhf up` and `rlhf down`: what they start, what they refuse, and that they leave nothing behind."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from flows import services
from flows.api import Api
from flows.follow import NodeView, RunView, follow
from flows.processes import ProcessId, alive, descendants, identify, wait_gone
from rlhf_core.config.pipeline import RunSettings
from rlhf_core.store import leases
from rlhf_core.store.store import Store
from stages.spec import StageSpec


def prefect_command(project: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The plain `prefect` command in `project`, of a user whose own profile names another server."""
    profiles = home / ".prefect" / "profiles.toml"
    profiles.parent.mkdir(parents=True, exist_ok=True)
    profiles.write_text('active = "own"\n[profiles.own]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=project,
        env=environment | {"HOME": str(home), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_port_in_use_is_named_and_nothing_is_left(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(services.ServicesError) as raised:
            services.up(tmp_path, port)
    expected = f"port {port} is in use by another program; choose a free one with `rlhf up --port PORT`"
    assert str(raised.value) == expected
    assert not (tmp_path / "prefect.toml").exists()
    assert not (tmp_path / ".rlhf" / "services.json").exists()


def test_a_prefect_toml_of_the_users_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "prefect.toml").write_text("[api]\n")
    with pytest.raises(services.ServicesError, match=r"prefect\.toml exists and was not written by `rlhf up`"):
        services.up(tmp_path)
    services.down(tmp_path)
    assert (tmp_path / "prefect.toml").read_text() == "[api]\n"


def test_down_without_up_does_nothing(tmp_path: Path):
    assert services.down(tmp_path) == []


def test_a_process_that_got_a_recorded_pid_later_is_not_ended(tmp_path: Path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        identity = identify(bystander.pid)
        assert identity is not None
        recorded = services.Services(port=9, processes={"server": ProcessId(identity.pid, identity.started - 1)})
        place = services.Place(tmp_path)
        place.home.mkdir(parents=True)
        services._write(place, recorded)
        assert services.down(tmp_path) == []
        assert bystander.poll() is None
        assert not place.record.exists()
    finally:
        bystander.kill()
        bystander.wait()


def test_the_users_own_prefect_settings_do_not_reach_the_services(tmp_path: Path):
    own = {"PREFECT_API_URL": "https://elsewhere", "PREFECT_PROFILE": "own", "PREFECT_API_KEY": "k"}
    inherited = own | {"PATH": "/bin"}
    environment = services.prefect_environment(services.Place(tmp_path), 4321, inherited)
    assert environment["PATH"] == "/bin"
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
    assert environment["PREFECT_HOME"] == str(tmp_path / ".rlhf" / "prefect")
    assert not {"PREFECT_PROFILE", "PREFECT_API_KEY"} & set(environment)


def test_the_first_cause_of_a_log_is_its_last_exception():
    log = """Traceback (most recent call last):
  File "x.py", line 1
sqlite3.DatabaseError: file is not a database
Application startup failed. Exiting.
"""
    assert services.first_cause(log) == "sqlite3.DatabaseError: file is not a database"
    assert services.first_cause("one\ntwo\n") == "two"
    assert services.first_cause("") == "its log is empty"


@pytest.mark.engines
class TestRunning:
    def test_up_again_starts_nothing(self, prefect):
        again = services.up(prefect.project)
        assert again.started == []
        assert again.services.processes == prefect.services.processes

    def test_another_port_is_refused(self, prefect):
        with pytest.raises(services.ServicesError, match=f"runs on {prefect.services.port}; `rlhf down` first"):
            services.up(prefect.project, prefect.services.port + 1)

    def test_the_plain_prefect_command_talks_to_it(self, prefect, tmp_path):
        done = prefect_command(prefect.project, tmp_path, "deployment", "ls")
        for name in ("stage-prepare-data/cpu", "stage-sft/gpu", "stage-rm/gpu", "stage-ppo/gpu", "sft-rm-ppo/demo"):
            assert name in done.stdout, done.stdout + done.stderr

    def test_pools_have_their_limits_and_parents_leave_a_place(self, prefect):
        with Api(prefect.services.api_url) as api:
            limits = {pool: api.get(f"/work_pools/{pool}")["concurrency_limit"] for pool in ("cpu", "gpu")}
            queues = {q["name"]: q["concurrency_limit"] for q in api.post("/work_pools/cpu/queues/filter")}
            parent = api.get("/deployments/name/sft-rm-ppo/demo")
        assert limits == {"cpu": 4, "gpu": 1}
        assert queues["pipelines"] == 3
        assert (parent["work_pool_name"], parent["work_queue_name"]) == ("cpu", "pipelines")
        assert parent["entrypoint"] == "flows.sft_rm_ppo.sft_rm_ppo"

    def test_silent_runs_are_crashed_by_an_automation_made_once(self, prefect):
        with Api(prefect.services.api_url) as api:
            automations = api.post("/automations/filter")
        assert [a["actions"][0]["state"] for a in automations] == ["CRASHED"]
        assert automations[0]["trigger"]["within"] >= 3 * services.HEARTBEAT_S

    def test_a_partial_parameter_fails_before_dispatch_and_shows_set(self, prefect):
        with Api(prefect.services.api_url) as api:
            deployment = api.get("/deployments/name/sft-rm-ppo/demo")
            body = {"parameters": deployment["parameters"] | {"ppo": {"steps": 3}}, "state": {"type": "SCHEDULED"}}
            run_id = api.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]
            ended = follow(api, RunView(run_id, {"ppo": NodeView()}), Console(quiet=True), lambda: None)
            children = api.flow_runs(tags={"all_": [f"parent:{run_id}"]})
        assert ended["state_type"] == "FAILED"
        assert "ppo.optimizer: missing" in ended["state"]["message"]
        assert """set, e.g. -p 'set=["ppo.optimizer.lr=1e-6"]'""" in ended["state"]["message"]
        assert "\n" not in ended["state"]["message"]
        assert children == []

    @pytest.mark.parametrize(
        ("killed", "started"),
        [("worker-gpu", ["worker-gpu"]), ("server", ["server", "worker-cpu", "worker-gpu"])],
    )
    def test_up_heals_what_died(self, prefect, killed: str, started: list[str]):
        running = services.running(prefect.project)
        assert running is not None
        victim = running.processes[killed]
        os.kill(victim.pid, signal.SIGKILL)
        assert wait_gone([victim], 30.0) == []
        healed = services.up(prefect.project)
        assert healed.started == started
        assert healed.services.port == prefect.services.port
        services.wait_workers(services.Place(prefect.project), healed.services)


@pytest.mark.engines
def test_down_cancels_a_live_run_and_leaves_no_process(tmp_path: Path, start_services):
    store = Store(str(tmp_path / "store"))
    key = "0" * 64
    leases.acquire(store, "sft", key, {"flow_run": "another"}, ttl_s=600)
    spec = StageSpec(
        stage="sft", node="sft", settings={}, key=key, key_source={}, inputs={}, run=RunSettings(store=store.url)
    )
    started = start_services(tmp_path)
    with Api(started.api_url) as api:
        deployment = api.get("/deployments/name/stage-sft/gpu")
        body = {"parameters": {"spec": spec.model_dump(mode="json")}, "state": {"type": "SCHEDULED"}}
        run_id = api.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]
        while api.flow_run(run_id)["state_type"] != "RUNNING":
            time.sleep(0.2)
    processes = [p for root in started.processes.values() for p in (root, *descendants(root.pid))]
    assert len(processes) > len(started.processes)
    assert services.down(tmp_path) == ["server", "worker-cpu", "worker-gpu"]
    assert [p for p in processes if alive(p)] == []
    assert not (tmp_path / "prefect.toml").exists()
    assert services.down(tmp_path) == []
    with closing(sqlite3.connect(tmp_path / ".rlhf" / "prefect" / "prefect.db")) as database:
        assert database.execute("select state_name from flow_run").fetchall() == [("Cancelled",)]


@pytest.mark.engines
def test_a_server_that_cannot_start_gives_its_first_cause(tmp_path: Path, start_services):
    place = services.Place(tmp_path)
    place.home.mkdir(parents=True)
    (place.home / "prefect.db").write_bytes(b"no database" * 1000)
    with pytest.raises(services.ServicesError) as raised:
        start_services(tmp_path)
    message = str(raised.value)
    assert "file is not a database" in message
    assert "\n" not in message
    assert not place.record.exists()
    assert not place.toml.exists()
