"""Tables of settings for the pages of the docs, made from the models."""

import json
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from rlhf_core.config.base import Settings


def settings_table(model: type[Settings], names: Iterable[str]) -> str:
    """Markdown: setting, default, meaning."""
    rows = [f"| `{name}` | {_default(model, name)} | {_meaning(model, name)} |" for name in names]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _default(model: type[Settings], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "those below" if isinstance(default, Settings) else f"`{json.dumps(default)}`"


def _meaning(model: type[Settings], name: str) -> str:
    field = model.model_fields[name]
    choices = _choices(field.annotation)
    one_of = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return f"{field.description}{one_of}"


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]
