"""Loading tokenizers, and what of them has to agree between models."""

import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(directory: str | Path) -> Any:
    """The tokenizer of a Hugging Face directory; padding falls back on EOS where it has none of its own."""
    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """What a manifest says of a tokenizer: digests of its vocabulary and merges, of its template, special ids."""
    backend = tokenizer.backend_tokenizer.to_str()
    return {
        "tokenizer_digest": hashlib.sha256(backend.encode()).hexdigest(),
        "chat_template_digest": hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest(),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
