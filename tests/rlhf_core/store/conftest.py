"""A store of each kind: a directory, and a bucket of a moto server on the loopback."""

from pathlib import Path

import pytest

from rlhf_core.store.store import Store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return Store(request.getfixturevalue("s3_url"))
    return Store(str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
