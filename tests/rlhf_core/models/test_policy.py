"""Log-probs in chunks against the logits of Hugging Face's own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlhf_core.models import head
from rlhf_core.models.backbone import hidden_states
from rlhf_core.models.head import LogitTransform, TokenHead
from rlhf_core.models.policy import Policy, check_head, load_causal

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "sliding_window": 64},
    "gemma3_text": {"final_logit_softcapping": None, "query_pre_attn_scalar": 8, "sliding_window": 64},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "phi3": {},
    "olmo2": {},
    "mixtral": MOE,
    "qwen3_moe": MOE,
}


def causal(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, **MODELS[model_type])
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # logits large enough for a cap or a scale to show
        model.get_output_embeddings().weight.mul_(30)
    return model


@pytest.mark.parametrize("model_type", MODELS)
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(model_type: str):
    model, ids = causal(model_type), torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits.float() / 0.7
    wanted = functional.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    weights = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    policy = Policy(model)
    check_head(policy)
    got = policy(ids, temperature=0.7)
    torch.testing.assert_close(got[:, 1:], wanted, rtol=1e-5, atol=2e-5)
    assert got[:, 0].tolist() == [0, 0]
    (got[:, 1:] * weights).sum().backward()
    for name, p in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-4 * float(grads[name].abs().max()))


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite"])
def test_entropy_and_its_gradient_are_those_of_the_models_own_logits(
    model_type: str, rows: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 64 * rows)
    model, ids = causal(model_type), torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    logp = functional.log_softmax(model(input_ids=ids, use_cache=False).logits.float()[:, :-1] / 0.7, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    taken = logp.gather(-1, ids[:, 1:, None])[..., 0]
    weights = torch.rand((2, *taken.shape), generator=torch.Generator().manual_seed(2))
    (torch.stack([taken, entropy]) * weights).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    policy = Policy(model)
    both = policy(ids, temperature=0.7, entropy=True)
    assert both.shape == (2, 2, 9)
    torch.testing.assert_close(both[1, :, 1:], entropy, rtol=1e-4, atol=2e-5)
    assert torch.equal(both[0], policy(ids, temperature=0.7))
    (both[:, :, 1:] * weights).sum().backward()
    for name, p in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-4 * float(grads[name].abs().max()))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "qwen3_moe"])
def test_packed_samples_do_not_see_one_another(model_type: str):
    model = causal(model_type)
    policy = Policy(model)
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randint(3, 64, (n,), generator=generator) for n in (5, 13, 1, 7)]
    alone = torch.cat([policy(sample[None])[0] for sample in samples])
    row = torch.cat([*samples, torch.zeros(3, dtype=torch.long)])[None]
    positions = torch.cat([torch.arange(n) for n in (5, 13, 1, 7, 3)])[None]
    policy.train()  # where transformers would otherwise make a cache
    torch.testing.assert_close(policy(row, position_ids=positions)[0, :26], alone, rtol=1e-5, atol=2e-5)


def test_a_model_that_changes_its_logits_otherwise_is_refused():
    model = causal("llama")
    plain = model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        output = plain(*arguments, **options)
        output.logits = output.logits * 1.5
        return output

    model.forward = forward
    with pytest.raises(ValueError, match="models of type llama change their head's output"):
        check_head(Policy(model))


def test_the_check_leaves_the_model_as_it_was():
    model, ids = causal("llama"), torch.tensor([[3, 4, 5]])
    policy = Policy(model)
    before = policy(ids)
    check_head(policy)
    assert torch.equal(policy(ids), before)


@pytest.mark.parametrize("form", [LogitTransform(), LogitTransform(0.5, 2.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_chunked_function_passes_gradcheck(monkeypatch: pytest.MonkeyPatch, form: LogitTransform, bias: bool):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 3 * 5)
    torch.manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    plain = nn.Linear(4, 5, bias=bias, dtype=torch.float64)
    module, labels = TokenHead.of(plain, form), torch.tensor([0, 1, 2, 3, 4, 0, 1])

    def logprobs(hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return module(hidden, labels=labels, temperature=0.8)

    logits = plain(hidden) * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    wanted = functional.log_softmax(logits / 0.8, -1)[torch.arange(7), labels]
    torch.testing.assert_close(logprobs(hidden), wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(logprobs, (hidden, *plain.parameters()))


def test_logits_of_a_few_tokens_are_those_of_the_model():
    model, ids = causal("gemma2"), torch.tensor([[3, 4, 5, 6]])
    wanted = model(input_ids=ids).logits[..., [7, 3]]
    policy = Policy(model)
    hidden, _ = hidden_states(model, ids, position_ids=None)
    got = policy.head(hidden, tokens=(7, 3))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad(logits.square().sum(), policy.head.weight, retain_graph=True)[0] for logits in (wanted, got)
    ]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_load_balancing_loss_is_the_models_own_and_leaves_out_fill(model_type: str):
    model = causal(model_type)
    ids = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=ids, output_router_logits=True).aux_loss
    policy = Policy(model)
    _, aux = policy(ids, position_ids=torch.arange(9)[None], aux_mask=torch.ones(1, 9))
    torch.testing.assert_close(aux, wanted)
    filled = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1.0] * 9 + [0.0] * 4])
    _, aux = policy(filled, position_ids=torch.arange(13)[None], aux_mask=mask)
    torch.testing.assert_close(aux, wanted)


def test_the_head_keeps_its_name_and_its_tie(tmp_path: Path):
    model = causal("qwen2")
    names = [name for name, _ in model.named_parameters()]
    policy = Policy(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert policy.head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.get_output_embeddings().weight, policy.head.weight)


def test_a_generation_config_that_could_not_be_saved_is_mended_or_refused_before_training(tmp_path: Path) -> None:
    """Transformers reads both and writes neither: the first as Llama 2 was published, the second for its last field."""
    causal("llama").save_pretrained(tmp_path / "model")
    written = tmp_path / "model" / "generation_config.json"
    written.write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    lm: Any = load_causal(str(tmp_path / "model"), dtype=torch.float32, attention="sdpa")
    lm.save_pretrained(tmp_path / "saved")
    config = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.9, 0.6)
    written.write_text(json.dumps({"temperature": 0.9, "output_scores": True}))
    with pytest.raises(
        ValueError, match=r"generation_config.json cannot be written again: .*output_scores.*; mend it$"
    ):
        load_causal(str(tmp_path / "model"), dtype=torch.float32, attention="sdpa")
