"""`python -m flows.deploy PROJECT [PIPELINE_FILE...]`: work pools, deployments and an automation on the server."""

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events import AutomationCore, EventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists, PrefectException
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from flows import services, sft_rm_ppo, stage_flow
from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import read_pipeline
from stages.plan import STAGES

# Parents wait for children of their own pool (prepare-data). If parents took all four of the pool's places they would
# wait for ever; a queue with a limit of its own always leaves one to the children.
PARENT_QUEUE = "pipelines"
PARENTS_AT_ONCE = services.POOLS["cpu"] - 1
TAG = "rlhf"


@dataclass(frozen=True)
class Deployment:
    """A flow, the name of its deployment, and where its runs go. The entry point is the flow's module path."""

    flow: Flow[..., Any]
    entrypoint: str
    name: str
    pool: str
    queue: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


def stage_deployments() -> list[Deployment]:
    return [
        Deployment(flow, f"flows.stage_flow.{attribute}", STAGES[stage].pool, STAGES[stage].pool)
        for stage, (attribute, flow) in stage_flow.FLOWS.items()
    ]


def pipeline_deployment(file: Path) -> Deployment:
    """`sft-rm-ppo/<stem>` with the file's content as parameters. Raises SettingsError when it cannot be read.

    The content is not validated here: a file with a fault in it must not keep the server from starting, and its run
    fails with the same message before anything is dispatched.
    """
    return Deployment(
        sft_rm_ppo.sft_rm_ppo,
        "flows.sft_rm_ppo.sft_rm_ppo",
        file.stem,
        "cpu",
        PARENT_QUEUE,
        read_pipeline(file),
    )


def register(client: SyncPrefectClient, deployments: list[Deployment], project: Path) -> None:
    """Create or update `deployments`; flow runs work in `project`, so that relative stores lie there."""
    for deployment in deployments:
        client.create_deployment(
            flow_id=client.create_flow_from_name(deployment.flow.name),
            name=deployment.name,
            entrypoint=deployment.entrypoint,
            work_pool_name=deployment.pool,
            work_queue_name=deployment.queue,
            parameters=deployment.parameters,
            description=deployment.flow.description,
            tags=[TAG],
            parameter_openapi_schema=parameter_schema(deployment.flow).model_dump(exclude_unset=True),
            # The server's own check says "'lr' is a required property"; the flow's says what to do instead.
            enforce_parameter_schema=False,
            job_variables={"working_dir": str(project)},
        )


def create_pools(client: SyncPrefectClient) -> None:
    template = ProcessWorker.get_default_base_job_template()
    for name, limit in services.POOLS.items():
        pool = WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
        _unless_there(client.create_work_pool, pool)
        # The worker may have come first and made its pool without a limit.
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
    _unless_there(client.create_work_queue, name=PARENT_QUEUE, work_pool_name="cpu", concurrency_limit=PARENTS_AT_ONCE)


def create_zombie_automation(client: SyncPrefectClient) -> None:
    """A run that falls silent becomes Crashed, so that Retry works on it; nothing else ends it when its machine died.

    Four missed heartbeats: less than three marked healthy runs Crashed.
    """
    name = "rlhf: a run that fell silent has crashed"
    if client.read_automations_by_name(name):
        return
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    trigger = EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *ended},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=4 * services.HEARTBEAT_S),
    )
    crash = ChangeFlowRunState(
        name=None,
        state=StateType.CRASHED,
        message="No heartbeat: its process or its machine has gone. Retry goes on from there.",
        force=False,
    )
    client.create_automation(AutomationCore(name=name, trigger=trigger, actions=[crash]))


def main(project: Path, pipelines: list[Path]) -> None:
    """Register all stages, and `pipelines` (none: those that are shipped)."""
    deployments = [*stage_deployments(), *map(pipeline_deployment, pipelines or services.shipped_pipelines())]
    with get_client(sync_client=True) as client:
        _wait_for_server(client)
        create_pools(client)
        register(client, deployments, project)
        create_zombie_automation(client)


def _wait_for_server(client: SyncPrefectClient) -> None:
    deadline = time.monotonic() + services.SERVER_START_S
    while (fault := client.api_healthcheck()) is not None:
        if time.monotonic() > deadline:
            raise services.ServicesError(f"no answer from the Prefect server: {fault}")
        time.sleep(0.1)


def _unless_there(create: Any, *args: Any, **options: Any) -> None:
    try:
        create(*args, **options)
    except ObjectAlreadyExists:
        return


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
    except (SettingsError, services.ServicesError, PrefectException, httpx.HTTPError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
