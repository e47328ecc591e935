"""The pipeline: data sets, then SFT, samples, reward models, DPO, KTO, PPO, evaluation; each made once, for ever."""

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run as this_run
from prefect.states import Completed, Failed
from pydantic import BaseModel

from flows.dispatch import Pipeline, Reference, artifact
from flows.plan_table import plan_markdown
from flows.report import write_report
from rlhf_core.config.base import SettingsError, parse_settings
from rlhf_core.config.data import DataSettings
from rlhf_core.config.pipeline import PipelineSettings, RunSettings, apply_overrides
from rlhf_core.config.rl import EvaluateSettings, PpoSettings
from rlhf_core.config.sampling import SampleSettings
from rlhf_core.config.supervised import DpoSettings, KtoSettings, PrmSettings, RmSettings, SftSettings
from rlhf_core.store.backends import StoreError
from rlhf_core.store.gc import note_use
from rlhf_core.store.store import Store
from stages.plan import PlannedStage, plan_pipeline
from stages.prepare_data import PREPARE_DATA
from stages.reasons import counts, explain
from stages.resources import estimate

DEFAULT_RUN = RunSettings.model_validate({})
NO_OVERRIDES: list[str] = []


# Parameters are checked here and not by Prefect, whose messages do not say that `set` changes a single setting.
@flow(name="sft-rm-ppo", validate_parameters=False)
def sft_rm_ppo(
    data: DataSettings,
    sft: SftSettings | None = None,
    sample: SampleSettings | None = None,
    rm: RmSettings | None = None,
    prm: PrmSettings | None = None,
    dpo: DpoSettings | None = None,
    kto: KtoSettings | None = None,
    ppo: PpoSettings | None = None,
    evaluate: EvaluateSettings | None = None,
    run: RunSettings = DEFAULT_RUN,
    set: list[str] = NO_OVERRIDES,
    plan_only: bool = False,
) -> State:
    """SFT, reward models, DPO, KTO, PPO and an evaluation: a stage for each section that is given. What the store has
    already is reused.

    Prefect replaces a parameter as a whole. To change single settings give `set`, a list of dotted overrides such as
    ["ppo.optimizer.lr=1e-6"], which is merged last. With plan_only nothing runs: the run's artifact `plan` says what
    would be made, and why.
    """
    supervised = {"sft": sft, "rm": rm, "prm": prm, "dpo": dpo, "kto": kto}
    sections = {**supervised, "sample": sample, "ppo": ppo, "evaluate": evaluate}
    try:
        settings = resolve({"data": data, **sections, "run": run}, set)
        plan = plan_pipeline(settings)
        if plan_only:
            return publish_plan(plan, Store(settings.run.store))
        pipeline = Pipeline(str(this_run.id), settings.run, plan)
        pipeline.store.check_writable()
        note_use(pipeline.store, pipeline.flow_run, [planned.key.key for planned in plan])
        _log_plan(pipeline)
    except (SettingsError, StoreError) as error:
        return Failed(message=str(error))
    futures: dict[str, PrefectFuture[Any]] = {}
    try:
        for planned in plan:
            upstream = [futures[source] for source in waits_for(planned, plan)]
            # Prefect's overloads know `wait_for` only together with `return_state`.
            futures[planned.node] = artifact.submit(planned.node, pipeline, wait_for=upstream, return_state=False)
        for future in futures.values():
            future.wait()
    except BaseException:
        pipeline.interrupted.set()
        raise
    failed = [future.state for future in futures.values() if future.state.is_failed() and not _not_ready(future.state)]
    if failed:
        return Failed(message=_cause(failed[0]))
    references: dict[str, Reference] = {node: future.result() for node, future in futures.items()}
    publish_report(pipeline, references)
    made = sum(not reference.reused for reference in references.values())
    return Completed(message=f"{made} artifacts made, {len(references) - made} reused")


def waits_for(planned: PlannedStage, plan: list[PlannedStage]) -> list[str]:
    """The nodes that end before `planned` starts: its inputs, and all data sets, so that a bad one is refused before
    any engine starts.
    """
    data = [] if planned.stage is PREPARE_DATA else [other.node for other in plan if other.stage is PREPARE_DATA]
    return list(dict.fromkeys([*data, *planned.inputs.values()]))


def resolve(given: dict[str, Any], overrides: list[str]) -> PipelineSettings:
    """The settings from the flow's parameters, with `overrides` merged last.

    Raises SettingsError, one line; for a missing setting it shows the override that would give it.
    """
    values = {
        name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value for name, value in given.items()
    }
    try:
        return parse_settings(PipelineSettings, apply_overrides(values, overrides))
    except SettingsError as error:
        if ": missing" not in str(error):
            raise
        raise SettingsError(
            f"{error}; a parameter replaces its whole stage, to change single settings use"
            " set, e.g. -p 'set=[\"ppo.optimizer.lr=1e-6\"]'"
        ) from None


def publish_plan(plan: list[PlannedStage], store: Store) -> State:
    """What a run would do, as the artifact `plan`. Raises StoreError."""
    explained = explain(plan, store)
    create_markdown_artifact(plan_markdown(explained, estimate(plan, store)), key="plan", description="what would run")
    return Completed(message=f"plan only: {counts(explained)}")


def publish_report(pipeline: Pipeline, references: Mapping[str, Reference]) -> None:
    """The report in the store, and as artifacts of this run: `report`, and its plots as `report-<name>`."""
    manifests = {node: manifest for node in references if (manifest := pipeline.manifest(node)) is not None}
    reused = {node: reference.reused for node, reference in references.items()}
    report = write_report(pipeline.store, manifests, reused, pipeline.flow_run)
    markdown = report.markdown
    for name, content in report.images.items():
        address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        # The UI has no access to the store: images travel inside the artifact.
        markdown = markdown.replace(f"]({name})", f"]({address})")
        key = "report-" + re.sub(r"[^a-z0-9]+", "-", Path(name).stem.lower())
        create_image_artifact(address, key=key, description=name)
    create_markdown_artifact(markdown, key="report", description="what was learned")


def _log_plan(pipeline: Pipeline) -> None:
    logger = get_run_logger()
    for node, planned in pipeline.plan.items():
        there = pipeline.manifest(node) is not None
        logger.info("%-14s %s  %s", node, planned.key.key[:12], "reused" if there else "to be made")


def _not_ready(state: State) -> bool:
    """A task that never ran, since what it waits for failed."""
    return state.name == "NotReady"


def _cause(state: State) -> str:
    # Prefect's message is "Task run encountered an exception StageFailed: ..."; the user wants what follows.
    message = " ".join((state.message or state.name or "failed").split())
    for name in ("StageFailed: ", "PipelineInterrupted: "):
        if name in message:
            return message.partition(name)[2]
    return message
