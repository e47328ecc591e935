"""How the parent gets one stage's artifact: reuse it, join whoever trains it now, or send the stage to its work pool.

What the parent believes is the store. A child that completed without a manifest has failed, and a manifest that appears
while a child is still tidying up is enough.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from rlhf_core.config.pipeline import RunSettings
from rlhf_core.store.artifacts import artifact_path, read_manifest
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import PlannedStage
from stages.spec import StageSpec

POLL_S = 1.0
LIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]


class StageFailed(Exception):
    """A stage's run ended without its artifact. The message is one line: the node, and the first cause."""


class PipelineInterrupted(Exception):
    """The pipeline's own run is ending, so this task gives up what it waits for."""


@dataclass(frozen=True)
class Reference:
    """Where a stage's artifact lies, as its manifest says."""

    node: str
    stage: str
    key: str
    url: str
    reused: bool


class Pipeline:
    """The parent run, as its tasks see it. A plain class: Prefect looks into dataclasses among a task's arguments."""

    def __init__(self, flow_run: str, run: RunSettings, plan: list[PlannedStage]):
        self.flow_run = flow_run
        self.run = run
        self.store = Store(run.store)
        self.plan = {planned.node: planned for planned in plan}
        # Set where the main thread is interrupted: TerminationSignal reaches that thread alone.
        self.interrupted = threading.Event()

    def manifest(self, node: str) -> Manifest | None:
        planned = self.plan[node]
        return read_manifest(self.store, planned.stage.name, planned.key.key)

    def reference(self, node: str, manifest: Manifest, *, reused: bool) -> Reference:
        url = f"{self.store.url}/{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}"
        return Reference(node, manifest.stage, manifest.key, url, reused)


@task(task_run_name="{node}", cache_policy=NO_CACHE, persist_result=False)
def artifact(node: str, pipeline: Pipeline) -> Reference:
    """The artifact of `node`. Raises StageFailed with the first cause when its run fails."""
    logger = get_run_logger()
    manifest = pipeline.manifest(node)
    if manifest is not None:
        logger.info("%s is published already: reused", node)
        return pipeline.reference(node, manifest, reused=True)
    with get_client(sync_client=True) as client:
        while True:
            child = live_child(client, pipeline, node)
            if child is None:
                child = send(pipeline, node)
                logger.info("%s: sent to its pool as run %s", node, child.name)
            else:
                logger.info("%s: joins run %s, which makes it now", node, child.name)
            mine = parent_tag(pipeline.flow_run) in child.tags
            state = follow(client, pipeline, child, mine)
            manifest = pipeline.manifest(node)
            if manifest is not None:
                # Another run may have published it while our child waited for the lease.
                made_here = mine and manifest.flow_run.get("id") == str(child.id)
                return pipeline.reference(node, manifest, reused=not made_here)
            if mine:
                raise StageFailed(f"{node}: {cause(child.name, state)}")


def live_child(client: SyncPrefectClient, pipeline: Pipeline, node: str) -> FlowRun | None:
    """The run that makes this very artifact now, or is about to; ours before another pipeline's."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[key_tag(pipeline.plan[node].key.key)]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=LIVE)),
        )
    )
    # The same key may be made in two stores; only a run that publishes into ours is worth waiting for.
    same_store = [run for run in found if Store(run.parameters["spec"]["run"]["store"]).url == pipeline.store.url]
    own = [run for run in same_store if parent_tag(pipeline.flow_run) in run.tags]
    return next(iter(own or same_store), None)


def send(pipeline: Pipeline, node: str) -> FlowRun:
    """Create the stage's run on its pool, as a subflow of this task."""
    planned = pipeline.plan[node]
    stage = planned.stage
    # Typed for coroutines too; in a task's thread it returns the run itself.
    created: Any = run_deployment(
        f"stage-{stage.name}/{stage.pool}",
        parameters={"spec": stage_spec(pipeline, node).model_dump(mode="json")},
        flow_run_name=f"{node}-{planned.key.key[:8]}",
        tags=["rlhf", f"node:{node}", key_tag(planned.key.key), parent_tag(pipeline.flow_run)],
        timeout=0,
        as_subflow=True,
    )
    return created


def stage_spec(pipeline: Pipeline, node: str) -> StageSpec:
    """The spec of a node whose inputs are all published. Raises StageFailed when one has gone."""
    planned = pipeline.plan[node]
    inputs: dict[str, dict[str, Any]] = {}
    for name, source in planned.inputs.items():
        manifest = pipeline.manifest(source)
        if manifest is None:
            raise StageFailed(f"{node}: its input {source} is missing from store {pipeline.store.url!r}")
        inputs[name] = manifest.model_dump(mode="json")
    return StageSpec(
        stage=planned.stage.name,
        node=node,
        settings=planned.settings.model_dump(mode="json"),
        key=planned.key.key,
        key_source=planned.key.source,
        inputs=inputs,
        # Absolute, so that the child and whoever reads its parameters mean the same place.
        run=pipeline.run.model_copy(update={"store": pipeline.store.url}),
    )


def follow(client: SyncPrefectClient, pipeline: Pipeline, child: FlowRun, mine: bool) -> State:
    """Wait for `child` to end; returns its final state. A server that is away is waited for.

    When the pipeline is cancelled or interrupted, a child of its own is cancelled and PipelineInterrupted is raised.
    """
    logger = get_run_logger()
    try:
        while True:
            try:
                state = client.read_flow_run(child.id).state
                stopping = pipeline.interrupted.is_set() or _cancelling(client, pipeline.flow_run)
            except httpx.HTTPError as error:
                logger.warning("the Prefect server cannot be asked, trying again: %s", error)
                state, stopping = None, pipeline.interrupted.is_set()
            if state is not None and state.is_final():
                return state
            if stopping:
                raise PipelineInterrupted(f"the pipeline was cancelled while it waited for {child.name}")
            time.sleep(POLL_S)
    except BaseException:
        if mine:
            _cancel(client, child.id)
        raise


def cause(name: str, state: State) -> str:
    """One line for a child that ended without its artifact."""
    if state.is_completed():
        return f"its run {name} completed, but its manifest is not in the store"
    message = " ".join((state.message or "").split())
    return (
        message if state.is_failed() and message else f"its run {name} is {state.name}: {message or 'no cause given'}"
    )


def key_tag(key: str) -> str:
    return f"key:{key}"


def parent_tag(flow_run: str) -> str:
    return f"parent:{flow_run}"


def _cancelling(client: SyncPrefectClient, flow_run: str) -> bool:
    state = client.read_flow_run(UUID(flow_run)).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _cancel(client: SyncPrefectClient, flow_run: UUID) -> None:
    try:
        state = client.read_flow_run(flow_run).state
        if state is None or not state.is_final():
            client.set_flow_run_state(flow_run, Cancelling(message="its pipeline was cancelled"))
    except (httpx.HTTPError, ObjectNotFound) as error:
        get_run_logger().warning("run %s could not be cancelled: %s", flow_run, error)
