import json

import pytest

from rlhf_core.store.manifest import Manifest
from stages.contract import ContractError, check_head, check_held_out, check_length, check_same_tokenizer, described

FACTS = {
    "tokenizer_digest": "a" * 64,
    "chat_template_digest": "b" * 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def manifest(stage="sft", **model):
    return Manifest(
        stage=stage,
        key="c" * 64,
        key_source={},
        attempt="x",
        files={},
        content_digest="0" * 64,
        model={**FACTS, **model},
    )


def test_equal_tokenizers_pass():
    check_same_tokenizer(policy=manifest(), reward=manifest("rm"))


@pytest.mark.parametrize(
    ("fact", "value", "shown"),
    [
        ("tokenizer_digest", "d" * 64, "'a' * 12... and 'd' * 12..."),
        ("chat_template_digest", "d" * 64, ""),
        ("eos_token_id", 5, "2 and 5"),
        ("pad_token_id", 2, "0 and 2"),
    ],
)
def test_a_difference_names_both_sides(fact, value, shown):
    with pytest.raises(ContractError) as caught:
        check_same_tokenizer(policy=manifest(), reward=manifest("rm", **{fact: value}))
    message = str(caught.value)
    assert f"policy (sft/cccccccccccc) and reward (rm/cccccccccccc) differ in {fact}" in message
    assert shown.replace("'a' * 12", "a" * 12).replace("'d' * 12", "d" * 12) in message


def test_a_reward_model_needs_its_head_and_statistics():
    head = {"name": "score", "mean": 1.5, "std": 0.5}
    assert check_head("reward", manifest("rm", head=head), "score") == head
    with pytest.raises(ContractError, match=r"reward \(sft/cccccccccccc\) has no score head; give a reward model"):
        check_head("reward", manifest(), "score")


def test_a_reward_model_is_no_process_reward_model():
    scores = manifest("rm", head={"name": "score", "mean": 1.5, "std": 0.5})
    with pytest.raises(ContractError, match=r"process \(rm/cccccccccccc\) has no verdict tokens; give a process"):
        check_head("process", scores, "process_reward")
    head = {"name": "process_reward", "placeholder_token": "a", "reward_tokens": ["b", "c"], "separator": ","}
    assert check_head("process", manifest("prm", head=head), "process_reward") == head


def test_a_stage_that_is_measured_on_held_out_rows_wants_some():
    data = manifest("prepare-data").model_copy(update={"metrics": {"rows": 3, "eval_rows": 0}})
    with pytest.raises(ContractError) as caught:
        check_held_out("rm", "pairs", data)
    assert str(caught.value).startswith("data.pairs (prepare-data/cccccccccccc) has no held-out rows, and rm is")
    check_held_out("rm", "pairs", data.model_copy(update={"metrics": {"rows": 3, "eval_rows": 1}}))


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"n_layer": 2}, None),
    ],
)
def test_a_sequence_has_to_fit_the_models_positions(tmp_path, config, longest):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = described("model", manifest())
    check_length("rm.max_len", 64, model, tmp_path)
    if longest is None:
        check_length("rm.max_len", 65, model, tmp_path)
    else:
        with pytest.raises(ContractError) as caught:
            check_length("rm.max_len", 65, model, tmp_path)
        named = "rm.max_len 65 is above max_position_embeddings 64 of model (sft/cccccccccccc)"
        assert str(caught.value).startswith(named)
