"""What has to agree between the artifacts that a stage reads, checked before an accelerator is taken."""

import json
from pathlib import Path

from rlhf_core.store.manifest import Manifest


class ContractError(Exception):
    """Two artifacts, or an artifact and a setting, that do not fit together. One line that names both sides."""


_SHARED = ("tokenizer_digest", "chat_template_digest", "bos_token_id", "eos_token_id", "pad_token_id")


def check_same_tokenizer(**models: Manifest) -> None:
    """Refuses models whose token ids mean different things, e.g. a reward model that would read the policy's ids."""
    (first, reference), *others = models.items()
    for name, manifest in others:
        for fact in _SHARED:
            ours, theirs = (reference.model or {}).get(fact), (manifest.model or {}).get(fact)
            if ours != theirs:
                raise ContractError(
                    f"{described(first, reference)} and {described(name, manifest)} differ in {fact}: {_short(ours)} "
                    f"and {_short(theirs)}; train both from one base model and tokenizer"
                )


def check_head(name: str, manifest: Manifest) -> tuple[float, float]:
    """(mean, std) of a reward model's held-out scores. Refuses a model without a score head."""
    head = (manifest.model or {}).get("head")
    if not isinstance(head, dict) or head.get("name") != "score":
        raise ContractError(f"{described(name, manifest)} has no score head; give a reward model")
    return float(head["mean"]), float(head["std"])  # type: ignore[arg-type]


def check_length(setting: str, length: int, model: str, directory: Path) -> None:
    """Refuses sequences longer than the model in `directory` has positions for. Both names are for the message.

    A model whose rotary embeddings are scaled by a factor goes further than its config's number; how far is left to
    the engine, as is a model without a number.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    positions = config.get("max_position_embeddings")
    if "factor" in (config.get("rope_parameters") or config.get("rope_scaling") or {}):
        return
    if positions is not None and length > positions:
        raise ContractError(
            f"{setting} {length} is above max_position_embeddings {positions} of {model}; lower it or start from a "
            f"model with more positions"
        )


def described(name: str, manifest: Manifest) -> str:
    """An input in a message: `policy (sft/0123456789ab)`."""
    return f"{name} ({manifest.stage}/{manifest.key[:12]})"


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else repr(value)
