"""What has to agree between the artifacts that a stage reads, checked before an accelerator is taken."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.store.manifest import Manifest


class ContractError(Exception):
    """Two artifacts, or an artifact and a setting, that do not fit together. One line that names both sides."""


_SHARED = (
    "tokenizer_digest",
    "chat_template_digest",
    "input_template",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def check_same_tokenizer(**models: Manifest) -> None:
    """Refuses models whose token ids mean different things, e.g. a reward model that would read the policy's ids, or
    that were trained to read prompts otherwise."""
    (first, reference), *others = models.items()
    for name, manifest in others:
        for fact in _SHARED:
            ours, theirs = (reference.model or {}).get(fact), (manifest.model or {}).get(fact)
            if ours != theirs:
                raise ContractError(
                    f"{described(first, reference)} and {described(name, manifest)} differ in {fact}: {_short(ours)} "
                    f"and {_short(theirs)}; train both from one base model and tokenizer"
                )


_HEADS = {
    "score": "has no score head; give a reward model",
    "process_reward": "has no verdict tokens; give a process reward model",
}


def check_head(name: str, manifest: Manifest, head: Literal["score", "process_reward"]) -> dict[str, Any]:
    """What the manifest says of a model's head. Refuses a model that has another one, or none.

    score: `mean` and `std` of the held-out scores. process_reward: `placeholder_token`, `reward_tokens`, `separator`.
    """
    facts = (manifest.model or {}).get("head")
    if not isinstance(facts, dict) or facts.get("name") != head:
        raise ContractError(f"{described(name, manifest)} {_HEADS[head]}")
    return facts


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


def check_models(
    manifests: Mapping[str, Manifest], inputs: Mapping[str, Path], lengths: Mapping[str, tuple[str, int]]
) -> None:
    """Refuses a policy and models of rewards that do not fit together: of the inputs those called policy, reward and
    process. lengths: input -> (what is so long, tokens that it has to read)."""
    models = {name: manifests[name] for name in ("policy", "reward", "process") if name in manifests}
    check_same_tokenizer(**models)
    for name, manifest in models.items():
        what, length = lengths[name]
        check_length(what, length, described(name, manifest), inputs[name] / "model")
    if "process" in models:
        check_head("process", models["process"], "process_reward")
    if "reward" in models:
        check_head("reward", models["reward"], "score")


def check_held_out(stage: str, dataset: str, data: Manifest) -> None:
    """Refuses a data set without held-out rows where a stage cannot do without."""
    if not data.metrics.get("eval_rows"):
        raise ContractError(
            f"{described(f'data.{dataset}', data)} has no held-out rows, and {stage} is measured on them; give "
            f"data.{dataset} an eval_path, eval_hub, eval_split or eval_share or, when generated, eval_rows"
        )


def described(name: str, manifest: Manifest) -> str:
    """An input in a message: `policy (sft/0123456789ab)`."""
    return f"{name} ({manifest.stage}/{manifest.key[:12]})"


def input_template(manifest: Manifest) -> str | None:
    """What a model was trained to read prompts through; None for the chat template."""
    template = (manifest.model or {}).get("input_template")
    return None if template is None else str(template)


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else repr(value)
