"""The flow of one stage: takes the lease, runs the driver under the supervisor, shows its progress in the UI.

Its parameter is the stage's whole spec, so Retry works on it as on its parent: what is published is reused, what was
trained in part goes on from its newest training checkpoint.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Flow, State, flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as this_run
from prefect.states import Cancelled, Completed, Failed

from flows.guardian import EVENTS, LOG, SPEC
from flows.processes import ProcessId, alive, identify
from flows.supervisor import StageFailed, StageStopped, Watch, attempt_label, attempt_scratch, origin, supervise
from rlhf_core.store import leases
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.backends import StoreError
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import STAGES
from stages.spec import StageSpec

LEASE_POLL_S = 1.0
PROGRESS_EVERY_S = 1.0
METRICS_EVERY_S = 2.0


@flow(validate_parameters=False)
def run_stage(spec: dict[str, Any]) -> State:
    """One stage, from its spec: the JSON that `python -m stages.<module> --spec FILE` takes."""
    stage_spec = StageSpec.model_validate(spec)
    run = _Run(stage_spec, Store(stage_spec.run.store), str(this_run.id), this_run.run_count)
    logger = get_run_logger()
    try:
        claimed = claim(run, logger, lambda: _cancelling(run.flow_run))
        if isinstance(claimed, Manifest):
            return Completed(message=f"{run.label} is published already; nothing to do")
        try:
            with leases.keep_alive(claimed):
                _drive(run, claimed, logger)
        finally:
            claimed.release()
    except StageFailed as failed:
        logger.error("%s", failed)
        return Failed(message=str(failed))
    except StageStopped as stopped:
        logger.error("%s", stopped)
        return Cancelled(message=str(stopped)) if _cancelling(run.flow_run) else Failed(message=str(stopped))
    if read_manifest(run.store, stage_spec.stage, stage_spec.key) is None:
        return Failed(message=f"the driver of {run.label} ended well, but published no manifest")
    return Completed(message=f"{run.label} is published")


prepare_data = run_stage.with_options(name="stage-prepare-data")
sft = run_stage.with_options(name="stage-sft")
sample = run_stage.with_options(name="stage-sample")
rm = run_stage.with_options(name="stage-rm")
prm = run_stage.with_options(name="stage-prm")
dpo = run_stage.with_options(name="stage-dpo")
kto = run_stage.with_options(name="stage-kto")
ppo = run_stage.with_options(name="stage-ppo")
evaluate = run_stage.with_options(name="stage-evaluate")

# Stage -> the flow's name in this module, and the flow. A flow for each, since the server links a retried child to its
# node of the parent's graph by the flow's deployment.
FLOWS: dict[str, tuple[str, Flow[..., Any]]] = {
    "prepare-data": ("prepare_data", prepare_data),
    "sft": ("sft", sft),
    "sample": ("sample", sample),
    "rm": ("rm", rm),
    "prm": ("prm", prm),
    "dpo": ("dpo", dpo),
    "kto": ("kto", kto),
    "ppo": ("ppo", ppo),
    "evaluate": ("evaluate", evaluate),
}


@dataclass(frozen=True)
class _Run:
    spec: StageSpec
    store: Store
    flow_run: str
    run_count: int

    @property
    def label(self) -> str:
        return f"{self.spec.node} ({self.spec.key[:12]})"

    @property
    def scratch(self) -> Path:
        return attempt_scratch(self.spec.run.scratch, self.spec.node, self.spec.key, self.flow_run, self.run_count)


def claim(run: _Run, logger: Any, cancelled: Callable[[], bool]) -> leases.Lease | Manifest:
    """The lease of this stage, or the manifest when there is one; waits while another run holds the lease.

    Raises StageStopped when `cancelled` says so while it waits.
    """
    stage, key = run.spec.stage, run.spec.key
    told = False
    while True:
        lease: leases.Lease | None = None
        try:
            lease = leases.acquire(run.store, stage, key, lease_owner(run.flow_run), run.spec.run.lease_ttl_s)
        except leases.LeaseHeld as held:
            if not told:
                logger.info("%s; waiting until it publishes or its lease is free", held)
                told = True
        # Read after the lease is held: whoever held it before may have published in between.
        manifest = read_manifest(run.store, stage, key)
        if manifest is not None:
            if lease is not None:
                lease.release()
            return manifest
        if lease is not None:
            return lease
        if cancelled():
            raise StageStopped("this run was cancelled while it waited for its lease")
        if not _release_for_the_dead(run.store, stage, key):
            time.sleep(LEASE_POLL_S)


def lease_owner(flow_run: str) -> dict[str, Any]:
    """Who holds a lease: the flow run, and the process for good (host, pid space, pid, start time)."""
    me = identify(os.getpid())
    return {
        "flow_run": flow_run,
        "host": socket.gethostname(),
        "pid_space": _pid_space(),
        "pid": os.getpid(),
        "started": me.started if me else 0,
    }


def _release_for_the_dead(store: Store, stage: str, key: str) -> bool:
    """Release the lease of a supervisor that was killed on this machine, rather than wait until it expires."""
    state = leases.holder(store, stage, key)
    if state is None or not state.alive or state.owner.get("pid_space") != _pid_space():
        return False
    if alive(ProcessId(state.owner["pid"], state.owner["started"])):
        return False
    try:
        leases.attach(store, stage, key, state.n).release()
    except leases.LeaseLost:
        # Another run that waits was quicker.
        return False
    return True


def _pid_space() -> str:
    """Where a pid of ours means something: this boot of this machine, and this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _drive(run: _Run, lease: leases.Lease, logger: Any) -> None:
    """Run the driver to its end; its log and events go to the store whatever happens."""
    scratch = run.scratch
    scratch.mkdir(parents=True, exist_ok=True)
    spec_file = scratch / SPEC
    flow_run = {"id": run.flow_run, "name": this_run.name, "parent": this_run.parent_flow_run_id}
    spec = run.spec.model_copy(update={"lease": lease.n, "scratch": str(scratch), "flow_run": flow_run})
    spec_file.write_text(spec.model_dump_json(indent=2))
    show = _Show(run.spec.node, logger)
    watch = Watch(event=show.event, line=logger.info, stop=lambda: _reason_to_stop(run.flow_run, lease))
    command = [sys.executable, "-m", STAGES[run.spec.stage].module, "--spec", str(spec_file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    try:
        supervise(command, scratch=scratch, watch=watch, environment=environment)
    finally:
        _keep_logs(run, [scratch / LOG, scratch / EVENTS], logger)


def _reason_to_stop(flow_run: str, lease: leases.Lease) -> str | None:
    """Called from the watchdog's thread. A server or store that cannot be reached is no reason."""
    try:
        lease.check()
    except leases.LeaseLost as lost:
        return str(lost)
    except (OSError, StoreError):
        pass
    return "this run was cancelled" if _cancelling(flow_run) else None


def _cancelling(flow_run: str) -> bool:
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run)).state
    except httpx.HTTPError:
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _keep_logs(run: _Run, files: list[Path], logger: Any) -> None:
    where = f"training/{run.spec.stage}/{run.spec.key}/logs/{attempt_label(run.flow_run, run.run_count)}"
    try:
        for file in files:
            if file.exists():
                run.store.upload_file(file, f"{where}/{file.name}")
    except (OSError, StoreError) as error:
        logger.warning("the driver's log stays in %s: %s", run.scratch, error)


@dataclass
class _Show:
    """Puts the driver's events into the Prefect UI. The UI is a view: a server that is away stops no training."""

    node: str
    logger: Any
    artifact: UUID | None = None
    progress_at: float = 0.0
    metrics_at: float = 0.0

    def event(self, event: dict[str, Any]) -> None:
        try:
            self._event(event)
        except httpx.HTTPError as error:
            self.logger.warning("not shown in the UI: %s: %s", type(error).__name__, error)

    def _event(self, event: dict[str, Any]) -> None:
        kind, now = event["type"], time.monotonic()
        if kind == "phase":
            self.logger.info("phase: %s", event["name"])
        elif kind == "progress":
            done = event["total"] > 0 and event["step"] >= event["total"]
            if done or now - self.progress_at >= PROGRESS_EVERY_S:
                self.progress_at = now
                self._progress(event)
        elif kind == "metrics":
            if now - self.metrics_at >= METRICS_EVERY_S:
                self.metrics_at = now
                values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(event["values"].items()))
                self.logger.info("step %s: %s", event["step"], values)
        elif kind == "summary":
            create_markdown_artifact(event["markdown"], key=f"summary-{self.node}", description=f"{self.node}")
        elif kind == "error":
            self.logger.error("%s\n%s", origin(event), event["traceback"])

    def _progress(self, event: dict[str, Any]) -> None:
        percent = min(100.0, 100.0 * event["step"] / max(event["total"], 1))
        description = f"{self.node}: {event['phase']}, step {event['step']} of {event['total']}"
        if self.artifact is None:
            # Typed for coroutines too; in a synchronous flow it returns the id itself.
            created: Any = create_progress_artifact(percent, key=f"progress-{self.node}", description=description)
            self.artifact = created
        else:
            update_progress_artifact(self.artifact, percent, description=description)
