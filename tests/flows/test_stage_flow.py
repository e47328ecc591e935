"""One stage through the real server, pool and worker, down to its real driver."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.api import Api
from flows.follow import NodeView, RunView, follow
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline
from stages.spec import StageSpec

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"

pytestmark = pytest.mark.engines


def data_spec(folder: Path, **changes: Any) -> StageSpec:
    overrides = ["data.eval.arithmetic.rows=20", f"run.store={folder / 'store'}", f"run.scratch={folder / 'scratch'}"]
    settings = load_pipeline(DEMO, overrides)
    planned = next(planned for planned in plan_pipeline(settings) if planned.node == "data-eval")
    spec = StageSpec(
        stage="prepare-data",
        node=planned.node,
        settings=planned.settings.model_dump(mode="json"),
        key=planned.key.key,
        key_source=planned.key.source,
        inputs={},
        run=settings.run,
    )
    return spec.model_copy(update=changes)


def run_stage(api: Api, spec: StageSpec) -> dict[str, Any]:
    deployment = api.get("/deployments/name/stage-prepare-data/cpu")
    body = {"parameters": {"spec": spec.model_dump(mode="json")}, "state": {"type": "SCHEDULED"}}
    run_id = api.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]
    return follow(api, RunView(run_id, {spec.node: NodeView()}), Console(quiet=True), lambda: None)


def test_a_stage_is_made_once_and_shown(prefect, tmp_path: Path):
    spec = data_spec(tmp_path)
    store = Store(spec.run.store)
    with Api(prefect.services.api_url) as api:
        first = run_stage(api, spec)
        assert (first["state_type"], first["state"]["message"]) == (
            "COMPLETED",
            f"data-eval ({spec.key[:12]}) is published",
        )
        manifest = read_manifest(store, "prepare-data", spec.key)
        assert manifest is not None
        assert manifest.flow_run["id"] == first["id"]
        filters = {"artifacts": {"flow_run_id": {"any_": [first["id"]]}}}
        assert "summary-data-eval" in {artifact["key"] for artifact in api.post("/artifacts/filter", filters)}
        second = run_stage(api, spec)
        assert second["state_type"] == "COMPLETED"
        assert "nothing to do" in second["state"]["message"]
    assert read_manifest(store, "prepare-data", spec.key) == manifest
    logs = f"training/prepare-data/{spec.key}/logs/{first['id'][-8:]}-1"
    assert store.list_names(logs) == ["driver.log", "events.jsonl"]


def test_the_drivers_first_cause_is_the_runs_message(prefect, tmp_path: Path):
    missing = tmp_path / "missing.jsonl"
    spec = data_spec(tmp_path, settings={"dataset": "eval", "source": {"path": str(missing)}})
    with Api(prefect.services.api_url) as api:
        ended = run_stage(api, spec)
    assert ended["state_type"] == "FAILED"
    message = ended["state"]["message"]
    assert message.startswith("driver: ")
    assert str(missing) in message
    assert "\n" not in message
    assert read_manifest(Store(spec.run.store), "prepare-data", spec.key) is None


def test_bad_data_is_refused_before_any_engine_starts(prefect, tmp_path: Path):
    bad = tmp_path / "eval.jsonl"
    bad.write_text('{"question": "1+1=", "label": "2"}\n')
    overrides = [f"run.store={tmp_path / 'store'}", f"run.scratch={tmp_path / 'scratch'}"]
    overrides += [f"data.{kind}.arithmetic={{rows: 8, eval_rows: 4}}" for kind in ("sft", "pairs")]
    overrides += ["data.steps=null", "data.prompts.arithmetic={rows: 8}", f"data.eval={{path: {bad}}}"]
    with Api(prefect.services.api_url) as api:
        deployment = api.get("/deployments/name/sft-rm-ppo/demo")
        body = {"parameters": {"set": overrides}, "state": {"type": "SCHEDULED"}}
        run_id = api.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"]
        nodes = ("data-sft", "data-pairs", "data-prompts", "data-eval")
        # A node beyond these would be a KeyError of the view.
        view = RunView(run_id, {node: NodeView() for node in nodes})
        ended = follow(api, view, Console(quiet=True), lambda: None)
        children = api.flow_runs(tags={"all_": [f"parent:{run_id}"]})
    assert ended["state_type"] == "FAILED"
    assert ended["state"]["message"].startswith("data-eval: ")
    assert "map them, e.g. columns: {prompt: question}" in ended["state"]["message"]
    assert sorted(child["parameters"]["spec"]["node"] for child in children) == sorted(nodes)
