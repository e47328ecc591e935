"""A Prefect of this project's own: `up` starts a server and a worker for each pool, `down` stops exactly those.

Everything lies below `<project>/.rlhf`: Prefect's home with its database, the logs, and services.json, which names the
processes by pid and start time. A Prefect that the user runs otherwise is neither read nor changed.
"""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from flows.api import Api, cancel_runs, close_runs
from flows.processes import ProcessId, alive, default_signals, descendants, end_processes, identify

DEFAULT_PORT = 4200
# At least 30 s is Prefect's rule for heartbeats; a silence of four of them marks a run Crashed (flows/deploy.py).
HEARTBEAT_S = 30
SERVER_START_S = 120.0
CANCEL_S = 90.0
STOP_S = 30.0
# Pool -> runs at once. The pool's limit and not the worker's: Prefect 3.7's worker dies ("this borrower is already
# holding one of this CapacityLimiter's tokens") when a run that it counts itself is retried within a second of its end.
POOLS = {"cpu": 4, "gpu": 1}
WORKER_NAMES = [f"worker-{pool}" for pool in POOLS]
TOML_MARK = "# Written by `rlhf up`, removed by `rlhf down`."


class ServicesError(Exception):
    """The services cannot be started or stopped. The message is one line with the first cause and what to do."""


@dataclass(frozen=True)
class Place:
    """The files of one project's services."""

    project: Path

    @property
    def root(self) -> Path:
        return self.project / ".rlhf"

    @property
    def home(self) -> Path:
        return self.root / "prefect"

    @property
    def record(self) -> Path:
        return self.root / "services.json"

    @property
    def toml(self) -> Path:
        return self.project / "prefect.toml"

    def log(self, service: str) -> Path:
        return self.root / "logs" / f"{service}.log"


@dataclass
class Services:
    """The processes that `up` started, by name: server, worker-cpu, worker-gpu."""

    port: int
    processes: dict[str, ProcessId] = field(default_factory=dict)

    @property
    def ui(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        return f"{self.ui}/api"

    def living(self) -> dict[str, ProcessId]:
        return {name: process for name, process in self.processes.items() if alive(process)}


@dataclass(frozen=True)
class UpResult:
    services: Services
    started: list[str]  # the services that this call started; empty: all were up


def up(project: Path, port: int | None = None) -> UpResult:
    """Start what does not run yet. Deployments are registered each time, so edited pipeline files take effect.

    Raises ServicesError: port in use, another port than the running server's, a server that does not come up.
    """
    place = Place(project.resolve())
    _check_toml(place)
    with _locked(place):
        services = _read(place) or Services(port=port or DEFAULT_PORT)
        before = services.living()
        if "server" in before and port not in (None, services.port):
            raise ServicesError(
                f"port {port} was asked for, but the server of this folder runs on {services.port}; `rlhf down` first"
            )
        if "server" not in before:
            # Workers of a server that died still hold its runs; under a new server they would only confuse it.
            _stop_processes(services, WORKER_NAMES)
            before = {}
        services.processes = dict(before)
        if "server" not in before:
            services.port = port or services.port
            _start_server(place, services)
        try:
            _bring_up(place, services)
        except (ServicesError, KeyboardInterrupt):
            if "server" not in before:
                _stop(place, services)
            raise
    return UpResult(services, sorted(set(services.processes) - set(before)))


def down(project: Path) -> list[str]:
    """Cancel live runs, wait for them, stop what `up` started. Returns the names of the stopped services."""
    place = Place(project.resolve())
    with _locked(place):
        services = _read(place)
        if services is None:
            _remove_toml(place)
            return []
        living = sorted(services.living())
        if "server" in living:
            with Api(services.api_url) as api:
                if api.healthy():
                    # Without its worker a run cannot be cancelled, only closed.
                    cancel_runs(api, CANCEL_S if set(living) == set(services.processes) else 5.0)
                    _stop_processes(services, WORKER_NAMES)
                    close_runs(api)
        _stop(place, services)
        return living


def running(project: Path) -> Services | None:
    """The services of `project` whose server lives and answers, or None."""
    services = _read(Place(project.resolve()))
    if services is None or "server" not in services.living():
        return None
    with Api(services.api_url) as api:
        return services if api.healthy() else None


def prefect_environment(place: Place, port: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` without the user's own Prefect settings, with ours."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("PREFECT_")}
    return kept | {
        "PREFECT_HOME": str(place.home),
        "PREFECT_PROFILES_PATH": str(place.home / "profiles.toml"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_LOGGING_COLORS": "false",
        "DO_NOT_TRACK": "1",
        # What is printed must reach the log file at once, or the cause of a crash stays in a buffer.
        "PYTHONUNBUFFERED": "1",
    }


def shipped_pipelines() -> list[Path]:
    """The pipeline files of the installed package."""
    return sorted(Path(str(files("deployments"))).glob("pipelines/*.yaml"))


def register_pipeline(project: Path, services: Services, file: Path) -> None:
    """Make the deployment `sft-rm-ppo/<stem of file>`."""
    place = Place(project.resolve())
    _finish_registering(place, _start_registering(place, services, [file.resolve()]))


def overriding_variables() -> list[str]:
    """Variables of this shell by which `prefect` would not talk to our server: they win over prefect.toml."""
    return sorted(set(os.environ) & {"PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_HOME"})


def port_in_use(port: int) -> bool:
    """Whether something listens on 127.0.0.1:`port`; the server binds it itself, and reports a lost race."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def first_cause(log: str) -> str:
    """The line of a service's log that says what went wrong: the last exception's line, or the last line at all."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception)\b.*:|Port \d+ is already in use)", line)]
    return (errors or lines or ["its log is empty"])[-1]


def _start_server(place: Place, services: Services) -> None:
    if port_in_use(services.port):
        raise ServicesError(
            f"port {services.port} is in use by another program; choose a free one with `rlhf up --port PORT`"
        )
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(services.port)]
    # With SQLite, docket logs a "database is locked" of 120 lines twice a second for a task that it then repeats.
    _spawn(place, services, "server", command, {"PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL"})


def _bring_up(place: Place, services: Services) -> None:
    # Registering spends two seconds on imports; meanwhile the server starts.
    register = _start_registering(place, services, [])
    try:
        _wait_healthy(place, services)
    except (ServicesError, KeyboardInterrupt):
        register.kill()
        register.wait()
        raise
    for pool in POOLS:
        name = f"worker-{pool}"
        if name not in services.processes:
            command = ["-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", name]
            _spawn(place, services, name, command)
    _finish_registering(place, register)
    _write_toml(place, services)


def _start_registering(place: Place, services: Services, pipelines: list[Path]) -> subprocess.Popen[bytes]:
    return _popen(place, services, "deploy", ["-m", "flows.deploy", str(place.project), *map(str, pipelines)])


def _finish_registering(place: Place, register: subprocess.Popen[bytes]) -> None:
    if register.wait() != 0:
        log = place.log("deploy")
        raise ServicesError(f"no deployments could be made: {first_cause(log.read_text())} (whole log: {log})")


def _wait_healthy(place: Place, services: Services) -> None:
    server = services.processes["server"]
    deadline = time.monotonic() + SERVER_START_S
    with Api(services.api_url) as api:
        while not api.healthy():
            log = place.log("server")
            if not alive(server):
                raise ServicesError(f"the Prefect server ended: {first_cause(log.read_text())} (whole log: {log})")
            if time.monotonic() > deadline:
                raise ServicesError(
                    f"the Prefect server did not answer within {SERVER_START_S:.0f} s:"
                    f" {first_cause(log.read_text())} (whole log: {log})"
                )
            time.sleep(0.1)


def wait_workers(place: Place, services: Services, timeout_s: float = 60.0) -> None:
    """Wait until the worker of every pool has reported to the server. Raises ServicesError when one ended instead."""
    deadline = time.monotonic() + timeout_s
    with Api(services.api_url) as api:
        for pool in POOLS:
            name = f"worker-{pool}"
            while not _online(api, pool, name):
                log = place.log(name)
                if not alive(services.processes[name]) or time.monotonic() > deadline:
                    raise ServicesError(f"{name} did not start: {first_cause(log.read_text())} (whole log: {log})")
                time.sleep(0.2)


def _online(api: Api, pool: str, name: str) -> bool:
    workers = api.post(f"/work_pools/{pool}/workers/filter")
    return any(worker["name"] == name and worker["status"] == "ONLINE" for worker in workers)


def _spawn(
    place: Place, services: Services, name: str, command: list[str], variables: Mapping[str, str] | None = None
) -> None:
    process = _popen(place, services, name, command, variables)
    identity = identify(process.pid)
    if identity is None:
        raise ServicesError(f"{name} ended at once: {first_cause(place.log(name).read_text())}")
    services.processes[name] = identity
    _write(place, services)


def _popen(
    place: Place, services: Services, name: str, command: list[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    log = place.log(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, default_signals():
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=place.project,
            env=prefect_environment(place, services.port, os.environ) | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _stop(place: Place, services: Services) -> None:
    _stop_processes(services, WORKER_NAMES)
    _stop_processes(services, ["server"])
    place.record.unlink(missing_ok=True)
    _remove_toml(place)


def _stop_processes(services: Services, names: list[str]) -> None:
    """End services and all that descends from them: a worker that was killed leaves its flow runs behind."""
    living = services.living()
    roots = [living[name] for name in names if name in living]
    trees = [process for root in roots for process in descendants(root.pid)]
    end_processes(roots, STOP_S)
    end_processes(trees, STOP_S)


def _read(place: Place) -> Services | None:
    try:
        record: dict[str, Any] = json.loads(place.record.read_text())
    except FileNotFoundError:
        return None
    processes = {name: ProcessId(**process) for name, process in record["processes"].items()}
    return Services(port=record["port"], processes=processes)


def _write(place: Place, services: Services) -> None:
    processes = {name: {"pid": p.pid, "started": p.started} for name, p in services.processes.items()}
    text = json.dumps({"port": services.port, "api_url": services.api_url, "processes": processes}, indent=2)
    draft = place.record.with_suffix(".part")
    draft.write_text(text + "\n")
    draft.replace(place.record)


def _check_toml(place: Place) -> None:
    if place.toml.exists() and TOML_MARK not in place.toml.read_text():
        raise ServicesError(f"{place.toml} exists and was not written by `rlhf up`; move it away or use another folder")


def _write_toml(place: Place, services: Services) -> None:
    # Prefect reads this file from the current folder, above its profiles and below the environment.
    text = f'{TOML_MARK}\nhome = {json.dumps(str(place.home))}\n\n[api]\nurl = "{services.api_url}"\n'
    place.toml.write_text(text + "\n[server]\nanalytics_enabled = false\n")


def _remove_toml(place: Place) -> None:
    if place.toml.exists() and TOML_MARK in place.toml.read_text():
        place.toml.unlink()


@contextmanager
def _locked(place: Place) -> Iterator[None]:
    """One `up` or `down` at a time in a project."""
    place.home.mkdir(parents=True, exist_ok=True)
    with (place.root / "services.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
