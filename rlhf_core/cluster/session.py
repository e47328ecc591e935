"""A Ray session for one stage: an existing cluster by address, or a local one that ends with the stage."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_core.cluster.leftovers import directory_prefix
from rlhf_core.config.pipeline import ClusterSettings

# Ray would otherwise start its uv hook, report usage, and fold lines of the ranks' logs together.
RAY_ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


class ClusterError(Exception):
    """The cluster cannot give what the settings ask for, or a worker died or hung. One line."""


@contextmanager
def ray_session(settings: ClusterSettings, *, actors: int) -> Iterator[None]:
    """Ray, initialised. A cluster that was there before is left running.

    `actors`: how many actors the stage will have; a local cluster is given at least as many logical CPUs, since on a
    small machine their number says nothing about how many processes may wait for one another.
    """
    os.environ.update(RAY_ENVIRONMENT)
    import ray
    from ray._private import ray_constants

    # Ray's switch for keeping a cluster of one node to loopback, on by default on desktop systems only. It replaces
    # an _node_ip_address of 127.0.0.1 by the machine's own address otherwise. The variable is for Ray's processes:
    # this one has read it when ray was first imported, which may have been before.
    ray_constants.ENABLE_RAY_CLUSTER = settings.address is not None
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(int(settings.address is not None))

    if settings.address is not None:
        ray.init(address=settings.address, log_to_driver=True, logging_level=logging.WARNING)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # Below /tmp: socket paths have a limit.
    with tempfile.TemporaryDirectory(prefix=directory_prefix("ray"), dir="/tmp") as temp:
        ray.init(
            address="local",
            num_cpus=max(actors, os.cpu_count() or 1),
            include_dashboard=False,
            _temp_dir=temp,
            _node_ip_address="127.0.0.1",
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
        try:
            yield
        finally:
            ray.shutdown()
