"""Adapters trained through DeepSpeed, against torch's AdamW on peft's forward; and what is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.training import LoraSettings
from rlhf_core.models.export import merge_adapter
from rlhf_core.models.lora import adapter_state, add_lora
from rlhf_core.store.keys import directory_digest

pytestmark = pytest.mark.engines

# eps keeps updates smooth where a gradient is near 0; no clipping, since the reference has none.
OPTIMIZER = {"lr": 0.02, "eps": 1e-2, "warmup_ratio": 0.0, "schedule": "constant", "max_grad_norm": 1e9}
LORA = LoraSettings(rank=2, alpha=8.0)  # as in lora_programs.py, with its seed and verdicts
SEED, VERDICTS = 7, [21, 22, 25]


def load(kind: str, directory: str | Path) -> Any:
    if kind == "rm":
        return AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, pad_token_id=0)
    return AutoModelForCausalLM.from_pretrained(directory)


def loss_of(kind: str, lm: Any, samples: Any) -> torch.Tensor:
    """Of all samples, one at a time, by transformers' forward."""

    def logits(ids: Any) -> torch.Tensor:
        return lm(torch.tensor([ids])).logits[0]

    if kind == "rm":
        differences = [logits(chosen[0]) - logits(rejected[0]) for chosen, rejected in samples]
        return -functional.logsigmoid(torch.cat(differences)).mean()
    losses = []
    for ids, start in samples:
        if kind == "sft":
            losses.append(
                functional.cross_entropy(logits(ids)[start - 1 : -1], torch.tensor(ids[start:]), reduction="none")
            )
        else:
            places = sorted({start, len(ids) - 1})
            labels = torch.tensor([ids[place] % len(VERDICTS) for place in places])
            losses.append(functional.cross_entropy(logits(ids)[places][:, VERDICTS], labels, reduction="none"))
    return torch.cat(losses).mean()


def reference(kind: str, directory: str, samples: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    lm = load(kind, directory)
    add_lora(lm, LORA, "reward" if kind == "rm" else "causal", SEED)
    trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(kind, lm, samples)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, adapter_state((name, parameter.detach()) for name, parameter in lm.named_parameters())


def error(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert set(given) == set(expected)
    ours, theirs = (torch.cat([one[name].float().flatten() for name in sorted(expected)]) for one in (given, expected))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        ("sft", {"ranks": 1, "zero_stage": 0}),
        ("sft", {"ranks": 2, "zero_stage": 3, "packing": True, "activation_checkpointing": True}),
        (
            "prm",
            {
                "ranks": 2,
                "zero_stage": 2,
                "activation_checkpointing": True,
                "activation_checkpointing_reentrant": True,
            },
        ),
        ("prm", {"ranks": 1, "zero_stage": 3}),
        ("rm", {"ranks": 2, "zero_stage": 3}),
        ("rm", {"ranks": 1, "zero_stage": 1}),
        ("experts", {"ranks": 2, "zero_stage": 3}),
    ],
)
def test_adapters_are_trained_as_without_deepspeed(
    groups: Any, request: pytest.FixtureRequest, exchanges: Any, pairs: Any, tmp_path: Path, kind: str, trainer: Any
) -> None:
    model = request.getfixturevalue({"rm": "scorer", "experts": "mixtral"}.get(kind, "llama"))
    kind = "sft" if kind == "experts" else kind
    samples = pairs if kind == "rm" else exchanges
    out = tmp_path / "model"
    done = groups[trainer["ranks"]].run(
        "train_lora",
        kind=kind,
        model=model,
        trainer={**trainer, "micro_batch_size": 4},
        optimizer=OPTIMIZER,
        samples=samples,
        steps=3,
        directory=str(out),
    )
    losses, expected = reference(kind, model, samples, steps=3)
    for rank in done:
        assert rank["losses"] == pytest.approx(losses, rel=1e-4)
    assert error(load_file(out / "adapter" / "adapter_model.safetensors"), expected) < 1e-4
    check_export(kind, model, out, tmp_path)


def check_export(kind: str, base: str, out: Path, tmp_path: Path) -> None:
    """The whole model is base and adapter in peft; `rlhf merge-lora` gives the very same files."""
    ids = torch.tensor([[7, 9, 30, 11, 12]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(load(kind, base), str(out / "adapter"))(input_ids=ids).logits
        plain, given = load(kind, base)(ids).logits, load(kind, out)(ids).logits
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert (given - plain).abs().max() > 0.01
    recorded = json.loads((out / "adapter" / "base.json").read_text())
    assert recorded == {"digest": directory_digest(base), "path": base}
    merge_adapter(base, out / "adapter", tmp_path / "merged", base_digest=directory_digest(base))
    ours, theirs = (load_file(where / "model.safetensors") for where in (tmp_path / "merged", out))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_small_updates_of_bfloat16_adapters_add_up(
    groups: Any, llama: str, exchanges: Any, tmp_path: Path, zero_stage: int
) -> None:
    """lr 1e-6 is below bfloat16's resolution at most weights: only float32 masters keep it."""
    done = groups[2].run(
        "train_lora",
        kind="sft",
        model=llama,
        trainer={"ranks": 2, "zero_stage": zero_stage, "micro_batch_size": 4},
        optimizer={**OPTIMIZER, "lr": 1e-6, "eps": 1e-8},
        samples=exchanges,
        steps=4,
        directory=str(tmp_path / "model"),
        dtype="bfloat16",
    )
    assert [one["masters"] for one in done] == [{"torch.float32"}] * 2
    adapter = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}
    # B began at 0; Adam moves each element by about lr a step, whatever the gradient.
    moved = torch.cat([tensor.float().abs().flatten() for name, tensor in adapter.items() if "lora_B" in name])
    assert float(moved.median()) == pytest.approx(4e-6, rel=0.3)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_adapters_on_4_bit_weights_are_exported_on_the_whole_base(
    groups: Any, llama: str, exchanges: Any, tmp_path: Path, zero_stage: int
) -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes")
    out = tmp_path / "model"
    done = groups[2].run(
        "train_lora",
        kind="sft",
        model=llama,
        trainer={"ranks": 2, "zero_stage": zero_stage, "micro_batch_size": 4},
        optimizer=OPTIMIZER,
        samples=exchanges,
        steps=4,
        directory=str(out),
        dtype="bfloat16",
        in_4bit=True,
    )
    assert done[0]["losses"][-1] < 0.9 * done[0]["losses"][0]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    base, adapter, given = (
        load_file(where)
        for where in (
            Path(llama) / "model.safetensors",
            out / "adapter" / "adapter_model.safetensors",
            out / "model.safetensors",
        )
    )
    assert set(given) == set(base)
    assert {tensor.dtype for tensor in given.values()} == {torch.bfloat16}
    layer = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{layer}.lora_{matrix}.weight"].float() for matrix in "AB")
    expected = base[f"{layer}.weight"].bfloat16().float() + 8 / 2 * b @ a
    torch.testing.assert_close(given[f"{layer}.weight"].float(), expected, rtol=2**-8, atol=1e-6)
    assert torch.equal(given["model.norm.weight"], base["model.norm.weight"].bfloat16())
