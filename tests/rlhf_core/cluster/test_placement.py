"""Where ranks are placed on a cluster of several nodes, here several of Ray's on this machine."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines

# In a process of its own: Ray is initialised once a process, and other tests have it for themselves.
PROGRAM = """
    import sys
    from pathlib import Path

    import ray
    from ray.cluster_utils import Cluster

    from rlhf_core.cluster.workers import WorkerGroup

    driver_cpus, size = int(sys.argv[1]), int(sys.argv[2])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": driver_cpus})
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    group = WorkerGroup(
        "trainer", "plain_rank:PlainRank", size, events=Path(sys.argv[3]), environment={}, start_timeout_s=60
    )
    group.call("__init__", per_rank=[(rank,) for rank in range(size)], timeout_s=60)
    nodes = group.call("node", timeout_s=60)
    print("at", *("driver" if node == ray.get_runtime_context().get_node_id() else "other" for node in nodes))
    group.close()
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.parametrize(
    ("driver_cpus", "size", "expected"),
    [(1, 3, "at driver other other"), (0, 2, "at other other")],
)
def test_rank_0_is_beside_the_driver_where_there_is_room(
    tmp_path: Path, driver_cpus: int, size: int, expected: str
) -> None:
    """Packed as they are, all three ranks would go to the larger node."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(driver_cpus), str(size), f"{tmp_path}/events.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout.splitlines()
