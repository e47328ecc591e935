"""Merging an adapter into its base on disk. peft's own outputs, unmerged, are the reference."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from rlhf_core.config.base import SettingsError
from rlhf_core.config.training import LoraSettings
from rlhf_core.models.export import BaseName, merge_adapter, write_adapter
from rlhf_core.models.lora import adapter_state, add_lora, is_adapter, merged_state
from rlhf_core.models.process_scorer import StepTokens, load_process_scorer
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.models.tokenizer import tokenizer_facts
from rlhf_core.store.keys import directory_digest

IDS = torch.tensor([[1, 9, 30, 7, 12, 2]])
TOKENS = StepTokens(placeholder=20, verdicts=(21, 22), separator="\n")
AUTO: dict[str, Any] = {
    "causal": AutoModelForCausalLM,
    "process": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
}


def write_base(directory: Path, dtype: str = "float32", hidden_size: int = 16) -> Path:
    return write_scratch_model(
        directory,
        hidden_size=hidden_size,
        layers=2,
        heads=2,
        kv_heads=1,
        intermediate_size=24,
        max_position=32,
        seed=3,
        dtype=dtype,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "model")


def load(kind: str, base: Path) -> Any:
    if kind == "process":
        return load_process_scorer(str(base), tokens=TOKENS, dtype=torch.float32, attention="sdpa").lm
    extra = {"num_labels": 1, "pad_token_id": 0} if kind == "reward" else {}
    return AUTO[kind].from_pretrained(base, dtype="auto", **extra)


def trained(kind: str, base: Path, directory: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """What training leaves: the model with its adapter, which is also on disk, and the whole weights."""
    lm = load(kind, base)
    add_lora(lm, LoraSettings(rank=3, alpha=12), "reward" if kind == "reward" else "causal", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    if kind == "reward":
        lm.config.update({"mean": 0.25, "std": 1.5})
    named = [(name, parameter.detach()) for name, parameter in lm.named_parameters()]
    write_adapter(directory, lm, adapter_state(named), directory_digest(base))
    return lm, dict(merged_state(lm, named))


@pytest.mark.parametrize("kind", ["causal", "reward", "process"])
def test_a_merged_model_gives_what_base_and_adapter_give(kind: str, base: Path, tmp_path: Path) -> None:
    _, state = trained(kind, base, tmp_path / "adapter")
    plain = AUTO[kind].from_pretrained(base, **({"num_labels": 1, "pad_token_id": 0} if kind == "reward" else {}))
    with torch.no_grad():
        expected = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(input_ids=IDS).logits
        merged = merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=directory_digest(base))
        model = AUTO[kind].from_pretrained(tmp_path / "out")
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert merged.kind == kind
    assert merged.difference < 1e-5
    # The very weights that training exports.
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(state)
    assert all(torch.equal(written[name], state[name]) for name in state)
    facts = [tokenizer_facts(AutoTokenizer.from_pretrained(where)) for where in (base, tmp_path / "out")]
    assert facts[0] == facts[1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_reward_models_head_labels_and_statistics_are_kept(base: Path, tmp_path: Path) -> None:
    lm, _ = trained("reward", base, tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=directory_digest(base))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert (config["mean"], config["std"], config["pad_token_id"]) == (0.25, 1.5, 0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.score.weight.shape == (1, 16)
    assert torch.equal(model.score.weight, lm.score.weight)


def test_a_process_models_tokens_are_kept(base: Path, tmp_path: Path) -> None:
    trained("process", base, tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=directory_digest(base))
    scorer = load_process_scorer(str(tmp_path / "out"), tokens=None, dtype=torch.float32, attention="sdpa")
    assert scorer.tokens == TOKENS


def test_bfloat16_base_and_another_dtype(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype="bfloat16")
    trained("causal", base, tmp_path / "adapter")
    digest = directory_digest(base)
    assert 1e-4 < merge_adapter(base, tmp_path / "adapter", tmp_path / "16", base_digest=digest).difference < 0.05
    wide = merge_adapter(base, tmp_path / "adapter", tmp_path / "32", base_digest=digest, dtype="float32")
    assert wide.difference < 1e-5
    dtypes = [AutoModelForCausalLM.from_pretrained(tmp_path / out, dtype="auto").dtype for out in ("16", "32")]
    assert dtypes == [torch.bfloat16, torch.float32]


def test_an_adapter_of_peft_alone_is_merged_when_its_base_is_vouched_for(base: Path, tmp_path: Path) -> None:
    model: Any = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0),
        LoraConfig(
            task_type="SEQ_CLS", r=2, target_modules=["q_proj", "up_proj"], use_rslora=True, init_lora_weights=False
        ),
    )
    model.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(SettingsError, match=r"has no base.json that names its base; .* give --any-base"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=directory_digest(base))
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=None)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model.eval()(IDS).logits, rtol=1e-5, atol=1e-6)


def test_the_chat_template_of_training_goes_with_the_merged_model(base: Path, tmp_path: Path) -> None:
    trained("causal", base, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=None)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


@pytest.mark.parametrize("beside_the_adapter", [True, False])
def test_generation_defaults_are_those_of_training_or_else_the_bases(
    base: Path, tmp_path: Path, beside_the_adapter: bool
) -> None:
    """The base's are as Llama 2's were published, which transformers reads and does not write."""
    own = tmp_path / "own"
    shutil.copytree(base, own)
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "eos_token_id": 7}))
    trained("causal", own, tmp_path / "adapter")
    if beside_the_adapter:
        (tmp_path / "adapter" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "top_k": 3}))
    merge_adapter(own, tmp_path / "adapter", tmp_path / "out", base_digest=None)
    config = GenerationConfig.from_pretrained(tmp_path / "out")
    if beside_the_adapter:
        assert (config.eos_token_id, config.top_k, config.temperature) == ([5, 9], 3, None)
    else:
        eos = AutoTokenizer.from_pretrained(own).eos_token_id
        assert (config.eos_token_id, config.temperature, config.top_p) == ([eos, 7], 0.9, 0.6)
        assert config.do_sample


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    trained("causal", base, tmp_path / "adapter")
    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        SettingsError, match=r"the adapter was trained on .*model\); give that directory, or --any-base"
    ):
        merge_adapter(other, tmp_path / "adapter", tmp_path / "out", base_digest=directory_digest(other))
    assert not (tmp_path / "out").exists()
    merge_adapter(other, tmp_path / "adapter", tmp_path / "out", base_digest=None)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["model.norm.weight"], weights["model.norm.weight"])


@pytest.mark.parametrize("kind", ["wider", "fewer tensors", "no adapter", "no base", "not empty", "no head"])
def test_what_does_not_fit_is_refused_and_leaves_nothing(kind: str, base: Path, tmp_path: Path) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    trained("reward" if kind == "no head" else "causal", base, adapter)
    message = ""
    if kind == "wider":
        base, message = write_base(tmp_path / "base", hidden_size=32), "does not fit base"
    elif kind in ("fewer tensors", "no head"):
        tensors = load_file(adapter / "adapter_model.safetensors")
        del tensors[sorted(tensors)[-1]]
        save_file(tensors, adapter / "adapter_model.safetensors")
        message = "does not fit base .*: 1 tensors differ, such as base_model.model"
        if kind == "no head":
            (adapter / "config.json").unlink()
            message = "holds no head `score`"
    elif kind == "no adapter":
        (adapter / "adapter_model.safetensors").unlink()
        message = "holds no adapter_model.safetensors; give an adapter's directory"
    elif kind == "no base":
        base, message = tmp_path / "nowhere", "nowhere holds no config.json"
    else:
        out.mkdir()
        (out / "mine.txt").write_text("")
        message = "out .* is not empty"
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(SettingsError, match=message):
        merge_adapter(base, adapter, out, base_digest=None)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_merged_model_that_gives_something_else_is_not_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("causal", base, tmp_path / "adapter")
    # As a merge that forgot the adapters.
    monkeypatch.setattr("rlhf_core.models.lora._merged", lambda layer, *, base, a, b: base.clone())
    with pytest.raises(SettingsError, match=r"outputs differ by .* so nothing was kept"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=None)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_other_methods_are_refused(base: Path, tmp_path: Path) -> None:
    trained("causal", base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_type": "IA3"}))
    with pytest.raises(SettingsError, match=r"has peft_type IA3 .*what is merged is LORA of CAUSAL_LM or SEQ_CLS"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out", base_digest=None)


def test_an_adapter_is_written_the_same_each_time(base: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        trained("causal", base, tmp_path / name)
    assert directory_digest(tmp_path / "one") == directory_digest(tmp_path / "two")
    targets = json.loads((tmp_path / "one" / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    assert json.loads((tmp_path / "one" / "base.json").read_text()) == {
        "digest": directory_digest(base),
        "path": str(base),
    }


def test_an_adapter_names_its_base_on_the_hub_with_the_commit(base: Path, tmp_path: Path) -> None:
    lm, _ = trained("causal", base, tmp_path / "adapter")
    named = [(name, parameter.detach()) for name, parameter in lm.named_parameters()]
    write_adapter(tmp_path / "named", lm, adapter_state(named), "0" * 64, BaseName("org/model", "c" * 40))
    config = PeftConfig.from_pretrained(str(tmp_path / "named"))
    assert (config.base_model_name_or_path, config.revision) == ("org/model", "c" * 40)
    assert json.loads((tmp_path / "named" / "base.json").read_text())["path"] == f"org/model@{'c' * 40}"
