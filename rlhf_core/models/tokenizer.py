"""Loading tokenizers, and what of them has to agree between models."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

GENERATION = "generation_config.json"


def load_tokenizer(directory: str | Path) -> Any:
    """The tokenizer of a Hugging Face directory, with a pad token that is not its EOS, chosen where it has none.

    Hugging Face's sequence classification scores the last token that is not the pad token: with EOS as the pad token
    it would be the one before EOS, while reward models are trained at EOS. The vocabulary does not grow. Raises
    ValueError where it holds no token to choose.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        chosen = _unused_token(tokenizer)
        if chosen is None:
            raise ValueError(
                f"the tokenizer of {directory} has no pad token apart from its EOS {tokenizer.eos_token!r}, and no "
                "unknown, pad or reserved token to take for one; set pad_token in its tokenizer_config.json to a token "
                "of its vocabulary that no text holds"
            )
        tokenizer.pad_token = chosen
    return tokenizer


def _unused_token(tokenizer: Any) -> str | None:
    """The unknown token, else the first special token made for padding, else the first reserved one."""
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    if tokenizer.unk_token not in {None, *taken}:
        return tokenizer.unk_token
    added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    for word in ("pad", "reserved"):
        for content in added:
            if word in content.lower() and content not in taken:
                return content
    return None


def stop_token_ids(directory: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """With which a model's responses end: the tokenizer's EOS, and what its generation_config.json names besides.

    A chat template may end turns with another token than the EOS (Llama 3.1: <|eot_id|> and <|end_of_text|>).
    """
    path = Path(directory) / GENERATION
    named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return tuple(dict.fromkeys(number for number in ids if number is not None))


def write_stop_token_ids(directory: str | Path, ids: Iterable[int]) -> None:
    """Into a model's generation_config.json, which Hugging Face's generation and vLLM stop by; the rest of it stays."""
    path = Path(directory) / GENERATION
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**config, "eos_token_id": list(ids)}, indent=2) + "\n", encoding="utf-8")


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """What a manifest says of a tokenizer: digests of its vocabulary and merges, of its template, special ids."""
    backend = tokenizer.backend_tokenizer.to_str()
    return {
        "tokenizer_digest": hashlib.sha256(backend.encode()).hexdigest(),
        "chat_template_digest": hashlib.sha256(_template_text(tokenizer.chat_template).encode()).hexdigest(),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _template_text(chat_template: str | dict[str, str] | None) -> str:
    """A tokenizer's chat template as one text, to tell it from others: its Jinja or, of several by name, JSON."""
    if isinstance(chat_template, dict):
        return json.dumps(chat_template, sort_keys=True)
    return chat_template or ""
