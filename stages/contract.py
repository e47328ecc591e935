"""What has to agree between the artifacts that a stage reads, checked before an accelerator is taken."""

from rlhf_core.store.manifest import Manifest


class ContractError(Exception):
    """Two artifacts that do not fit together. One line that names both sides."""


_SHARED = ("tokenizer_digest", "chat_template_digest", "bos_token_id", "eos_token_id", "pad_token_id")


def check_same_tokenizer(**models: Manifest) -> None:
    """Refuses models whose token ids mean different things, e.g. a reward model that would read the policy's ids."""
    (first, reference), *others = models.items()
    for name, manifest in others:
        for fact in _SHARED:
            ours, theirs = (reference.model or {}).get(fact), (manifest.model or {}).get(fact)
            if ours != theirs:
                raise ContractError(
                    f"{first} ({reference.stage}/{reference.key[:12]}) and {name} ({manifest.stage}/"
                    f"{manifest.key[:12]}) differ in {fact}: {_short(ours)} and {_short(theirs)}; train both from one "
                    f"base model and tokenizer"
                )


def check_head(name: str, manifest: Manifest) -> tuple[float, float]:
    """(mean, std) of a reward model's held-out scores. Refuses a model without a score head."""
    head = (manifest.model or {}).get("head")
    if not isinstance(head, dict) or head.get("name") != "score":
        raise ContractError(f"{name} ({manifest.stage}/{manifest.key[:12]}) has no score head; give a reward model")
    return float(head["mean"]), float(head["std"])  # type: ignore[arg-type]


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else repr(value)
