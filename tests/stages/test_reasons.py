"""What the plan says is what then happens: keys that are reused are found, and a reason names exactly what changed."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import publish, read_manifest
from rlhf_core.store.checkpoints import complete, upload_shards
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from stages.plan import PlannedStage, plan_pipeline
from stages.reasons import ABSENT, Change, explain

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"

# Override -> (the node whose key it enters, the leaf's name, what the demo has, what it becomes); None: neutral.
CHANGES: dict[str, tuple[str, str, Any, Any] | None] = {
    "ppo.optimizer.lr=1e-6": ("ppo", "ppo.optimizer.lr", 1.5e-4, 1e-6),
    "ppo.optimizer.eps=1e-6": ("ppo", "ppo.optimizer.eps", 1e-8, 1e-6),
    "ppo.critic.optimizer.schedule=linear": ("ppo", "ppo.critic.optimizer.schedule", "constant", "linear"),
    "ppo.lora={rank: 4}": ("ppo", "ppo.lora", None, {"rank": 4}),
    "ppo.sampler.engine_args={block_size: 32}": ("ppo", "ppo.sampler.engine_args.block_size", ABSENT, 32),
    "rm.batch_size=32": ("rm", "rm.batch_size", 64, 32),
    "sft.model.scratch.layers=2": ("sft", "sft.model.scratch.layers", 3, 2),
    "sft.optimizer.betas=[0.9, 0.99]": ("sft", "sft.optimizer.betas", [0.9, 0.95], [0.9, 0.99]),
    "evaluate.max_new_tokens=20": ("evaluate", "evaluate.max_new_tokens", 24, 20),
    "data.eval.arithmetic.rows=10": ("data-eval", "data.eval.arithmetic.rows", 267, 10),
    "data.pairs.arithmetic.seed=3": ("data-pairs", "data.pairs.arithmetic.seed", 0, 3),
    "ppo.trainer.ranks=1": None,
    "sft.trainer.save_steps=7": None,
}
READERS = {
    "data-sft": {"sft": "data"},
    "data-pairs": {"rm": "data"},
    "data-prompts": {"ppo": "prompts"},
    "data-eval": {"ppo": "eval", "evaluate": "data"},
    "sft": {"rm": "model", "ppo": "policy", "evaluate": "sft"},
    "rm": {"ppo": "reward"},
    "ppo": {"evaluate": "ppo"},
}


def planned(*overrides: str) -> list[PlannedStage]:
    return plan_pipeline(load_pipeline(DEMO, overrides))


def publish_as_a_run_would(store: Store, one: PlannedStage, directory: Path, run: str = "calm-owl") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rows.jsonl").write_text("{}\n")
    fields = {"stage": one.stage.name, "key": one.key.key, "key_source": one.key.source, "flow_run": {"name": run}}
    publish(store, local_dir=directory, manifest_fields=fields, lease=None)


def publish_all(store: Store, plan: list[PlannedStage], directory: Path) -> None:
    for one in plan:
        publish_as_a_run_would(store, one, directory)


def expected(overrides: list[str]) -> dict[str, set[str]]:
    """Node -> what its reason has to name, by hand: its own leaves, and inputs of which something changed."""
    leaves: dict[str, set[str]] = {}
    for change in (CHANGES[override] for override in overrides):
        if change is not None:
            leaves.setdefault(change[0], set()).add(change[1])
    for node in ("data-pairs", "data-eval", "sft", "rm", "ppo"):
        for reader, name in READERS[node].items() if node in leaves else ():
            leaves.setdefault(reader, set()).add(f"input {name}")
    return leaves


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(CHANGES)), unique=True), st.sets(st.integers(0, 8)))
def test_the_plan_is_what_then_happens(overrides: list[str], made: set[int]):
    with tempfile.TemporaryDirectory() as temp:
        store, files = Store(f"{temp}/store"), Path(temp, "files")
        old, plan = planned(), planned(*overrides)
        publish_all(store, old, files)
        before = {one.node: one.key.key for one in old}
        # Some of the new artifacts are there as well: a run that was stopped on its way.
        for number in made & set(range(len(plan))):
            publish_as_a_run_would(store, plan[number], files, "second-run")
        wanted = expected(overrides)
        for one, number in zip(explain(plan, store), range(len(plan)), strict=True):
            node, key = one.planned.node, one.planned.key.key
            manifest = read_manifest(store, one.planned.stage.name, key)
            assert (one.state == "reused") == (manifest is not None)
            assert (key == before[node]) == (node not in wanted)
            assert (one.state == "reused") == (node not in wanted or number in made)
            if one.state != "reused":
                assert {change.what for change in one.changes} == wanted[node]
                assert one.nearest is not None
                assert one.nearest.key == before[node]
                by_name = {change.what: change for change in one.changes}
                for change in (CHANGES[override] for override in overrides):
                    if change is not None and change[0] == node:
                        assert by_name[change[1]] == Change("setting", *change[1:])


def test_words_of_a_reason(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    publish_all(store, planned(), tmp_path / "files")
    overrides = ["ppo.optimizer.lr=1e-6", "ppo.lora={rank: 4}", "data.eval.arithmetic.rows=10"]
    reasons = {one.planned.node: one.reason for one in explain(planned(*overrides), store)}
    key = {one.node: one.key.key for one in planned()}["ppo"][:12]
    assert reasons["ppo"].startswith(
        'ppo.optimizer.lr 0.00015 -> 1e-06; ppo.lora null -> {"rank": 4}; input eval: data-eval is to run '
        f"(against {key}, made 20"
    )
    assert reasons["ppo"].endswith(" by run calm-owl)")
    assert reasons["sft"].endswith(" by run calm-owl")
    assert reasons["data-eval"].startswith("data.eval.arithmetic.rows 267 -> 10 (")


def test_a_changed_file_is_named_and_its_old_artifact_found_again(tmp_path: Path):
    store, file = Store(str(tmp_path / "store")), tmp_path / "sft.jsonl"
    row = json.dumps({"prompt": "1+1=", "response": "2"}) + "\n"
    override = f"data.sft={{path: {file}}}"
    file.write_text(row)
    publish_all(store, planned(override), tmp_path / "files")
    file.write_text(row * 2)
    changed = {one.planned.node: one for one in explain(planned(override), store)}
    assert changed["data-sft"].reason.startswith("data.sft.path: content changed (against")
    assert [change.what for change in changed["sft"].changes] == ["input data"]
    file.write_text(row)
    assert {one.state for one in explain(planned(override), store)} == {"reused"}


def test_the_nearest_artifact_has_the_fewest_changes(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    for overrides in ([], ["ppo.optimizer.lr=1e-6", "ppo.seed=5"], ["ppo.seed=5", "ppo.epochs=1"]):
        publish_all(store, planned(*overrides), tmp_path / "files")
    ppo = {one.planned.node: one for one in explain(planned("ppo.optimizer.lr=1e-6", "ppo.seed=6"), store)}["ppo"]
    assert ppo.changes == (Change("setting", "ppo.seed", 5, 6),)


def test_a_stage_that_was_begun_is_resumed_and_one_that_is_made_now_says_so(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    plan = planned()
    sft = next(one for one in plan if one.node == "sft")
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "weights").write_text("w")
    shards = upload_shards(store, "sft", sft.key.key, 40, tmp_path / "shard")
    complete(store, "sft", sft.key.key, 40, shards, {}, None)
    acquire(store, "sft", sft.key.key, {"host": "node-7"}, 60)
    found = {one.planned.node: one for one in explain(plan, store)}
    assert (found["sft"].state, found["sft"].step) == ("resumed", 40)
    assert found["sft"].reason == (
        "being made now on node-7; goes on from the training checkpoint of step 40; the store has nothing of sft"
    )
    assert found["rm"].reason == "the store has nothing of rm"


@pytest.mark.parametrize("damage", ["{", '{"schema_version": 2}'])
def test_a_damaged_manifest_of_another_key_hides_no_plan(tmp_path: Path, damage: str):
    store = Store(str(tmp_path / "store"))
    store.write_bytes(f"artifacts/sft/{'ab' * 32}/manifest.json", damage.encode())
    assert {one.state for one in explain(planned(), store)} == {"to run"}
