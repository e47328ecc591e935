"""How large a model is, from what can be read without loading it. Loads without torch."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rlhf_core.config.training import ScratchModel

# Of the small Llama from scratch.
VOCABULARY_SIZE = 32


def header_length(first_bytes: bytes) -> int:
    """Bytes of a safetensors file before its data, from its first 8."""
    return 8 + int.from_bytes(first_bytes[:8], "little")


def header_parameters(header: bytes) -> int:
    """Elements of all tensors of a safetensors file, from its first `header_length` bytes."""
    tensors = json.loads(header[8:])
    return sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")


def scratch_parameters(model: ScratchModel) -> int:
    """Of a Llama with untied embeddings and no biases."""
    h = model.hidden_size
    attention = 2 * h * h + 2 * h * (h // model.heads * model.kv_heads)
    layer = attention + 3 * h * model.intermediate_size + 2 * h
    return 2 * VOCABULARY_SIZE * h + model.layers * layer + h


def scratch_config(model: ScratchModel) -> dict[str, Any]:
    """What `kv_bytes_per_token` and `adapter_parameters` ask of a model's config.json."""
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
    }


def kv_bytes_per_token(config: Mapping[str, Any], bytes_per_value: int) -> int | None:
    """Key and value of every layer; None where config.json does not say."""
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return 2 * config["num_hidden_layers"] * heads * head_dim * bytes_per_value
    except KeyError:
        return None


def adapter_parameters(config: Mapping[str, Any], rank: int) -> int | None:
    """Of LoRA on all linear layers of a Llama-like model: rank x (in + out) each; None where config.json does not
    say."""
    try:
        h, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or h // heads
        kv = (config.get("num_key_value_heads") or heads) * head_dim
        shapes = 2 * (h + heads * head_dim) + 2 * (h + kv) + 3 * (h + ffn)
        return config["num_hidden_layers"] * rank * shapes
    except KeyError:
        return None
