"""Estimates against hand calculations, and counts of parameters against the models themselves."""

from pathlib import Path

import pytest

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.config.training import ScratchModel
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.models.size import adapter_parameters, kv_bytes_per_token, scratch_parameters
from rlhf_core.store.artifacts import publish
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline
from stages.resources import artifact_model, estimate, source_model

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"
SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "max_position": 64}
# Meta-Llama-3-8B's config.json.
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def roles(store: Path, *overrides: str) -> dict[str, dict[str, int | None]]:
    plan = plan_pipeline(load_pipeline(DEMO, overrides))
    found = estimate(plan, Store(str(store)))
    return {node: {role.name: role.bytes for role in one.memory} for node, one in found.items()}


def test_parameters_are_those_of_the_model(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    directory = write_scratch_model(tmp_path / "model", seed=0, **SIZES)
    true = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(directory).parameters())
    scratch = ScratchModel(**SIZES)
    assert scratch_parameters(scratch) == true
    plan = plan_pipeline(load_pipeline(DEMO, [f"sft.model={{path: {directory}}}"]))
    sft = next(one for one in plan if one.node == "sft")
    from_path = source_model(sft.settings.model)
    assert from_path is not None
    assert from_path.parameters == true
    (tmp_path / "made").mkdir()
    directory.rename(tmp_path / "made" / "model")
    store = Store(str(tmp_path / "store"))
    fields = {"stage": "sft", "key": sft.key.key, "key_source": sft.key.source}
    publish(store, local_dir=tmp_path / "made", manifest_fields=fields, lease=None)
    published = artifact_model(store, sft)
    assert published is not None
    assert published.parameters == true


def test_kv_cache_and_adapters_of_llama_3_8b():
    assert kv_bytes_per_token(LLAMA, 2) == 131072  # 128 KiB a token, the figure that is commonly given
    # q, o: 4096 + 4096; k, v: 4096 + 1024; gate, up, down: 4096 + 14336. peft prints 20,971,520 for rank 8.
    assert adapter_parameters(LLAMA, 8) == 20_971_520
    assert kv_bytes_per_token({"hidden_size": 8}, 2) is None


@pytest.mark.parametrize(
    ("trainer", "weights", "states"),
    # Of P parameters in bfloat16 on 4 ranks: 2 P of weights, 4 P of gradients, 12 P of states, divided as ZeRO says.
    [
        ("zero_stage: 1", 2 + 4, 12 / 4),
        ("zero_stage: 2", 2 + 4 / 4, 12 / 4),
        ("zero_stage: 3", 2 / 4 + 4 / 4, 12 / 4),
        ("zero_stage: 3, tensor_parallel: 2", (2 / 2 + 4 / 2) / 2, 12 / 2 / 2),
    ],
)
def test_memory_follows_zero(tmp_path: Path, trainer: str, weights: float, states: float):
    of_sft = roles(tmp_path, "sft.dtype=bfloat16", f"sft.trainer={{ranks: 4, {trainer}}}")["sft"]
    scratch = ScratchModel(hidden_size=128, layers=3, heads=4, kv_heads=2, intermediate_size=256, max_position=64)
    p = scratch_parameters(scratch)
    assert of_sft == {"model": pytest.approx(weights * p, abs=1), "model optimizer": pytest.approx(states * p, abs=1)}


def test_ppo_has_the_roles_that_its_settings_ask_for(tmp_path: Path):
    full = ["policy", "policy optimizer", "critic", "critic optimizer", "reference", "reward", "sampler", "KV cache"]
    assert list(roles(tmp_path)["ppo"]) == full
    lora = roles(tmp_path, "ppo.lora={rank: 4}", "ppo.reward={exact: 1}")["ppo"]
    assert set(lora) == set(full) - {"reference", "reward"}
    assert lora["policy optimizer"] < lora["critic optimizer"] / 5


def test_disk_is_checkpoints_and_export(tmp_path: Path):
    plan = plan_pipeline(load_pipeline(DEMO, ["sft.trainer.keep_checkpoints=1", "rm.trainer.save_steps=null"]))
    found = estimate(plan, Store(str(tmp_path)))
    p = scratch_parameters(
        ScratchModel(hidden_size=128, layers=3, heads=4, kv_heads=2, intermediate_size=256, max_position=64)
    )
    # One kept and one being written, each 4 + 12 bytes a parameter, and 4 of the export.
    assert found["sft"].disk == (2 * 16 + 4) * p
    assert found["rm"].disk == 4 * p
    assert found["sft"].accelerators == 2
    assert found["ppo"].accelerators == 3


def test_a_model_of_the_hub_is_unknown(tmp_path: Path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    found = roles(tmp_path, f"sft.model={{hub: org/name, revision: {commit}}}")
    assert found["sft"] == {"model": None, "model optimizer": None}
    assert found["ppo"]["policy"] is None
