"""What all tests share. Data sets are found at ../shared/data or in RLHF_TEST_DATA, never copied."""

import os
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent / "support"))

# Before anything is imported: the number of threads enters the bits, and nothing reports home.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    RAY_USAGE_STATS_ENABLED="0",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    VLLM_NO_USAGE_STATS="1",
)


@pytest.fixture(scope="session")
def project() -> Path:
    return PROJECT


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The real data sets. Without them a test is skipped; on CI it fails."""
    directory = Path(os.environ.get("RLHF_TEST_DATA") or PROJECT.parent / "shared" / "data")
    if not directory.is_dir():
        message = f"{directory} does not exist; set RLHF_TEST_DATA to the directory of the test data"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return directory
