"""Encoders and what tests read of their samples."""

from typing import Any

from rlhf_core.config.supervised import PrmSettings, TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.samples import Sample

PROMPT = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "How are you?"}]
STEPS = ["Step 1: 3 + 4 = 7.", "Step 2: 7 + 5 = 12.", "The answer is 12"]
_PRM: dict[str, Any] = {
    "optimizer": {"lr": 1e-5},
    "batch_size": 1,
    "max_len": 1000,
    "max_steps": 1,
    "placeholder_token": "<|step|>",
    "reward_tokens": ("+", "-"),
}


def encoder(tokenizer: Any, max_len: int = 1000, **text: Any) -> Encoder:
    return Encoder(tokenizer, TextSettings(**text), max_len)


def prm(**settings: Any) -> PrmSettings:
    return PrmSettings.model_validate(_PRM | settings)


def decode(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def split(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    """(text that is not trained on before, text that is): for samples with one trained run at the end."""
    begin = int((sample.weights > 0).argmax())
    assert (sample.weights[begin:] > 0).all()
    return decode(tokenizer, sample.ids[:begin]), decode(tokenizer, sample.ids[begin:])
