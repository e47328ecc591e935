"""`rlhf merge-lora`: what it writes, and that its errors are one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flows.cli import app
from rlhf_core.config.training import LoraSettings
from rlhf_core.models.export import write_adapter
from rlhf_core.models.lora import adapter_state, add_lora, is_adapter
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.keys import directory_digest


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/ and adapter/: B is 1 in one layer, 0 in the others."""
    root = tmp_path_factory.mktemp("lora")
    write_scratch_model(
        root / "base", hidden_size=8, layers=1, heads=1, kv_heads=1, intermediate_size=8, max_position=16, seed=0
    )
    lm = AutoModelForCausalLM.from_pretrained(root / "base")
    add_lora(lm, LoraSettings(rank=2, alpha=4), "causal", seed=0)
    with torch.no_grad():
        lm.model.layers[0].mlp.up_proj.lora_B["default"].weight.fill_(1.0)
    named = [(name, parameter.detach()) for name, parameter in lm.named_parameters() if is_adapter(name)]
    write_adapter(root / "adapter", lm, adapter_state(named), directory_digest(root / "base"))
    return root


def merge_lora(root: Path, out: Path, *options: str) -> Any:
    places = ["--base", str(root / "base"), "--adapter", str(root / "adapter"), "--out", str(out)]
    return CliRunner().invoke(app, ["merge-lora", *places, *options])


def test_the_sum_is_written(trained: Path, tmp_path: Path) -> None:
    result = merge_lora(trained, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "merged causal model; outputs differ from base and adapter by" in result.output
    base, merged = (load_file(where / "model.safetensors") for where in (trained / "base", tmp_path / "out"))
    layer = "model.layers.0.mlp.up_proj"
    a = load_file(trained / "adapter" / "adapter_model.safetensors")[f"base_model.model.{layer}.lora_A.weight"]
    for name, weight in base.items():
        added = 4 / 2 * a.sum(0).expand(8, 8) if name == f"{layer}.weight" else 0
        torch.testing.assert_close(merged[name], weight + added, rtol=1e-6, atol=1e-6)


def test_a_dtype_can_be_asked_for(trained: Path, tmp_path: Path) -> None:
    assert merge_lora(trained, tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_another_base_is_an_error_of_one_line_and_can_be_allowed(trained: Path, tmp_path: Path) -> None:
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
        for file in (trained / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "base" / "README.md").write_text("another directory")
    result = merge_lora(tmp_path, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: base ")
    assert result.stderr.count("\n") == 1
    assert merge_lora(tmp_path, tmp_path / "out", "--any-base").exit_code == 0


def test_a_directory_that_is_missing_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = merge_lora(tmp_path, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == f"error: directory '{tmp_path / 'base'}' does not exist\n"
