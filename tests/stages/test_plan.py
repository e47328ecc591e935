import hashlib
import json

import pytest
from botocore.exceptions import NoCredentialsError

from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.keys import directory_digest
from stages.plan import plan_pipeline


@pytest.fixture
def plan(project):
    def planned(*overrides):
        settings = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", overrides)
        return {node.node: node for node in plan_pipeline(settings)}

    return planned


def keys(plan):
    return {node: planned.key.key for node, planned in plan.items()}


def changed(before, after):
    return {node for node in before if before[node] != after[node]}


def test_every_node_comes_after_its_inputs(plan):
    seen = set()
    for node, planned in plan().items():
        assert set(planned.inputs.values()) <= seen
        seen.add(node)
    assert seen == {
        "data-sft",
        "data-pairs",
        "data-steps",
        "data-prompts",
        "data-eval",
        "sft",
        "rm",
        "ppo",
        "evaluate",
    }


@pytest.mark.parametrize(
    ("override", "redone"),
    [
        ("ppo.algorithm.kl.coef=0.7", {"ppo", "evaluate"}),
        ("rm.optimizer.lr=0.1", {"rm", "ppo", "evaluate"}),
        ("sft.seed=7", {"sft", "rm", "ppo", "evaluate"}),
        ("data.sft.arithmetic.rows=10", {"data-sft", "sft", "rm", "ppo", "evaluate"}),
        ("data.pairs.arithmetic.seed=9", {"data-pairs", "rm", "ppo", "evaluate"}),
        ("data.steps.arithmetic.seed=9", {"data-steps"}),
        ("data.eval.arithmetic.rows=10", {"data-eval", "ppo", "evaluate"}),
        ("evaluate.max_new_tokens=23", {"evaluate"}),
        ("ppo.trainer.ranks=1", set()),
        ("sft.trainer.zero_stage=3", set()),
        ("run.store=/elsewhere", set()),
    ],
)
def test_only_what_depends_on_a_change_is_redone(plan, override, redone):
    assert changed(keys(plan()), keys(plan(override))) == redone


def test_a_data_file_enters_by_its_content_and_not_by_its_path(plan, tmp_path):
    def with_file(name, text):
        path = tmp_path / name
        path.write_text(text)
        return keys(plan(f"data.sft={{path: {path}}}"))

    row = json.dumps({"prompt": "1+1=", "response": "2"}) + "\n"
    first = with_file("a.jsonl", row)
    assert with_file("b.jsonl", row) == first
    assert changed(first, with_file("c.jsonl", row * 2)) == {"data-sft", "sft", "rm", "ppo", "evaluate"}


def test_a_foreign_model_enters_by_its_content(plan, tmp_path):
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16, "max_position": 32}
    made = [write_scratch_model(tmp_path / str(n), seed=seed, **sizes) for n, seed in enumerate((0, 0, 1))]
    same, again, other = (keys(plan(f"sft.model={{path: {path}}}")) for path in made)
    assert same == again
    assert changed(same, other) == {"sft", "rm", "ppo", "evaluate"}


STAGE = "optimizer: {lr: 1e-3}, batch_size: 8, max_len: 32, max_steps: 2"
PRM = f"prm={{{STAGE}, placeholder_token: a, reward_tokens: [b, c]}}"
DPO = f"dpo={{{STAGE}}}"
KTO = f"kto={{{STAGE}}}"


def test_every_section_becomes_a_node_that_reads_what_it_needs(plan, tmp_path):
    (tmp_path / "labelled.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2", "label": True}) + "\n")
    data = f"data.labelled={{path: {tmp_path}/labelled.jsonl}}"
    planned = plan(PRM, DPO, KTO, data, "ppo.policy=dpo", "ppo.reward={prm: 1, rm: 1}")
    assert {node: dict(one.inputs) for node, one in planned.items() if not node.startswith("data-")} == {
        "sft": {"data": "data-sft"},
        "rm": {"data": "data-pairs", "model": "sft"},
        "prm": {"data": "data-steps", "model": "sft"},
        "dpo": {"data": "data-pairs", "model": "sft"},
        "kto": {"data": "data-labelled", "model": "sft"},
        "ppo": {
            "policy": "dpo",
            "prompts": "data-prompts",
            "eval": "data-eval",
            "reward": "rm",
            "process": "prm",
        },
        "evaluate": {"sft": "sft", "dpo": "dpo", "kto": "kto", "ppo": "ppo", "data": "data-eval"},
    }
    assert "reward" not in plan("ppo.reward={exact: 1}")["ppo"].inputs
    assert plan("ppo.reward={exact: 1}", "ppo.critic.init=rm")["ppo"].inputs["reward"] == "rm"


@pytest.mark.parametrize("name", ["demo", "demo-prm", "demo-dpo", "demo-kto", "demo-on-policy"])
def test_a_shipped_demo_can_be_planned(project, name):
    nodes = plan_pipeline(load_pipeline(project / "deployments" / "pipelines" / f"{name}.yaml"))
    assert nodes[-1].node == "evaluate"


def test_a_stage_with_a_model_of_its_own_does_not_wait_for_sft(plan, tmp_path):
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16, "max_position": 32}
    own, reference = (write_scratch_model(tmp_path / str(n), seed=n, **sizes) for n in (0, 1))
    stage = f"{STAGE}, model: {{path: {own}}}"
    plain = plan(f"dpo={{{stage}}}")["dpo"]
    assert dict(plain.inputs) == {"data": "data-pairs"}
    assert plain.key.source["inputs"]["model"] == directory_digest(own)
    other = plan(f"dpo={{{stage}, reference: {{path: {reference}}}}}")["dpo"]
    assert other.key.source["inputs"]["reference"] == directory_digest(reference)


def test_ptx_reads_the_rows_of_sft_and_its_template_enters_by_its_content(plan, tmp_path):
    template = tmp_path / "a.jinja"
    template.write_text("{{ messages }}")
    ptx = plan(f"ppo.ptx={{coef: 0.5, max_len: 16, text: {{chat_template: {template}}}}}")["ppo"]
    assert ptx.inputs["ptx"] == "data-sft"
    assert ptx.key.source["code"] == {"ptx.text.chat_template": hashlib.sha256(b"{{ messages }}").hexdigest()}
    assert "ptx" not in plan()["ppo"].inputs


def test_a_users_chat_template_enters_by_its_content(plan, tmp_path):
    def with_template(name, text):
        path = tmp_path / name
        path.write_text(text)
        return plan(f"rm.text={{chat_template: {path}}}")

    first = with_template("a.jinja", "{{ messages }}")
    assert first["rm"].key.source["code"] == {
        "text.chat_template": hashlib.sha256(b"{{ messages }}").hexdigest(),
    }
    assert keys(with_template("b.jinja", "{{ messages }}")) == keys(first)
    changed_keys = changed(keys(first), keys(with_template("a.jinja", "{{ messages | length }}")))
    assert changed_keys == {"rm", "ppo", "evaluate"}
    with pytest.raises(SettingsError, match=r"^rm\.text\.chat_template: file /nowhere\.jinja does not exist; give"):
        plan("rm.text={chat_template: /nowhere.jinja}")


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("model.safetensors", "has no weights (*.safetensors)"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
    ],
)
def test_an_incomplete_model_directory_is_refused_before_anything_starts(plan, tmp_path, left_out, message):
    for name in {"model.safetensors", "config.json", "tokenizer.json"} - {left_out}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(SettingsError) as caught:
        plan(f"sft.model={{path: {tmp_path}}}")
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_model_directory_that_reaches_itself_through_a_link_is_refused(plan, tmp_path):
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(SettingsError, match=r"^sft\.model\.path: .* twice through links; remove the link"):
        plan(f"sft.model={{path: {tmp_path}}}")


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied"), ValueError("the store gives no ETag"), NoCredentialsError()],
)
def test_data_that_cannot_be_read_is_refused_in_one_line(plan, monkeypatch, error):
    def refuse(url):
        raise error

    monkeypatch.setattr("stages.inputs.remote_fingerprint", refuse)
    with pytest.raises(SettingsError) as caught:
        plan("data.eval={path: s3://bucket/eval.jsonl}")
    assert str(caught.value).startswith("data.eval.path: file s3://bucket/eval.jsonl cannot be read: ")
    assert str(error) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.model={path: /nowhere/model}", "sft.model.path: /nowhere/model is not a directory"),
        ("data.sft={path: /nowhere/x.jsonl}", "data.sft.path: file /nowhere/x.jsonl does not exist"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_starts(plan, override, message):
    with pytest.raises(SettingsError) as caught:
        plan(override)
    assert message in str(caught.value)
