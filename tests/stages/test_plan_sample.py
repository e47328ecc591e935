"""The stage sample in the plan: what it reads, who reads it, and what is redone when it changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.config.pipeline import load_pipeline
from stages.plan import PlannedStage, plan_pipeline

Plan = Callable[..., dict[str, PlannedStage]]

STAGE = "optimizer: {lr: 1e-3}, batch_size: 8, max_len: 48, max_steps: 2"
SAMPLE = (
    "sample={form: pairs, samples_per_prompt: 4, max_new_tokens: 24, max_prompt_len: 24, eval_share: 0.1, "
    "reward: {exact: 1}, sampler: {max_model_len: 64}}"
)
ON_POLICY = (SAMPLE, "rm.pairs=on_policy")


@pytest.fixture
def plan(project: Path) -> Plan:
    def planned(*overrides: str) -> dict[str, PlannedStage]:
        settings = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", overrides)
        return {node.node: node for node in plan_pipeline(settings)}

    return planned


def changed(before: dict[str, PlannedStage], after: dict[str, PlannedStage]) -> set[str]:
    return {node for node in before if before[node].key.key != after[node].key.key}


def test_pairs_of_the_policy_stand_in_for_the_data_set(plan: Plan) -> None:
    given, own = plan(), plan(*ON_POLICY)
    assert dict(own["sample"].inputs) == {"policy": "sft", "prompts": "data-prompts"}
    assert dict(own["rm"].inputs) == {"data": "sample", "model": "sft"}
    assert own["rm"].key.source["inputs"]["data"] == own["sample"].key.key
    assert changed(given, own) == {"rm", "ppo", "evaluate"}
    # The stage alone, which nobody reads, changes nothing.
    assert not changed(given, plan(SAMPLE))


@pytest.mark.parametrize(
    ("override", "redone"),
    [
        ("sample.seed=1", {"sample", "rm", "ppo", "evaluate"}),
        ("sample.pairs.min_margin=0.5", {"sample", "rm", "ppo", "evaluate"}),
        ("data.prompts.arithmetic.seed=3", {"data-prompts", "sample", "rm", "ppo", "evaluate"}),
        ("data.pairs.arithmetic.seed=3", {"data-pairs"}),
        ("rm.optimizer.lr=0.1", {"rm", "ppo", "evaluate"}),
        ("sample.sampler.kv_cache_gib=3", set()),
        ("sample.scorer.batch_size=3", set()),
    ],
)
def test_only_what_depends_on_a_change_is_redone(plan: Plan, override: str, redone: set[str]) -> None:
    assert changed(plan(*ON_POLICY), plan(*ON_POLICY, override)) == redone


def test_every_reader_and_every_model_of_the_stage(plan: Plan) -> None:
    prm = f"prm={{{STAGE}, placeholder_token: a, reward_tokens: [b, c], steps: on_policy}}"
    steps = plan(SAMPLE, "sample.form=steps", "sample.reward={rm: 1}", prm)
    assert dict(steps["sample"].inputs) == {"policy": "sft", "prompts": "data-prompts", "reward": "rm"}
    assert steps["prm"].inputs["data"] == "sample"
    dpo = plan(SAMPLE, f"dpo={{{STAGE}, pairs: on_policy}}")
    assert (dpo["dpo"].inputs["data"], dpo["rm"].inputs["data"]) == ("sample", "data-pairs")


@pytest.mark.parametrize(
    ("overrides", "first", "then"),
    [
        (ON_POLICY, "sample", "rm"),
        ((SAMPLE, "sample.policy=ppo"), "ppo", "sample"),
        ((SAMPLE, "sample.reward={rm: 1}"), "rm", "sample"),
    ],
)
def test_each_node_comes_after_its_inputs_and_evaluation_last(
    plan: Plan, overrides: tuple[str, ...], first: str, then: str
) -> None:
    nodes = plan(*overrides)
    names = list(nodes)
    for number, planned in enumerate(nodes.values()):
        assert set(planned.inputs.values()) <= set(names[:number])
    assert names.index(first) < names.index(then)
    assert names[-1] == "evaluate"


def test_a_reward_function_of_the_stage_enters_by_its_content(plan: Plan, tmp_path: Path) -> None:
    def key(text: str) -> str:
        (tmp_path / "reward.py").write_text(text)
        return plan(SAMPLE, f"sample.reward={{functions: [{{path: {tmp_path}/reward.py}}]}}")["sample"].key.key

    first = key("one")
    assert first == key("one") != key("two")
