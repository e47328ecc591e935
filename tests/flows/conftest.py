"""One real Prefect server, with its workers, for all tests of this folder that need it."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows import services


@dataclass(frozen=True)
class Prefect:
    project: Path
    services: services.Services


@pytest.fixture(scope="session")
def start_services() -> Callable[[Path], services.Services]:
    """`up` in a folder on some free port; on another one when a program took the port in between."""

    def start(project: Path) -> services.Services:
        for _ in range(5):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            try:
                return services.up(project, port).services
            except services.ServicesError as error:
                if "in use" not in str(error):
                    raise
        raise RuntimeError("no free port in five attempts")

    return start


@pytest.fixture(scope="session")
def prefect(
    tmp_path_factory: pytest.TempPathFactory, start_services: Callable[[Path], services.Services]
) -> Iterator[Prefect]:
    project = tmp_path_factory.mktemp("project")
    started = start_services(project)
    try:
        services.wait_workers(services.Place(project), started)
        yield Prefect(project, started)
    finally:
        services.down(project)
