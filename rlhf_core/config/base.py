"""What every settings model shares: strict fields, the Neutral mark, key extraction, one-line errors."""

import difflib
import types
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


class SettingsError(Exception):
    """A setting that cannot be used. The message is one line: what was given, what is allowed, what to do."""


class NeutralMark:
    """Marks a field that does not change what a stage produces, so it is no part of the stage's key."""


Neutral = NeutralMark()

S = TypeVar("S", bound="Settings")


class Settings(BaseModel):
    """Base of all settings: unknown names are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def is_neutral(field: FieldInfo) -> bool:
    return any(isinstance(mark, NeutralMark) for mark in field.metadata)


def key_settings(settings: Settings) -> dict[str, Any]:
    """The part of `settings` that enters the key: every field that is neither neutral nor equal to its default.

    Defaults are left out so that an option added later keeps the keys of artifacts made before it existed.
    """
    kept: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        if is_neutral(field):
            continue
        value = _key_value(getattr(settings, name))
        if field.is_required() or value != key_default(field):
            kept[name] = value
    return kept


def key_default(field: FieldInfo) -> Any:
    """A field's default in the form in which `key_settings` holds values; PydanticUndefined where it has none."""
    return _key_value(field.get_default(call_default_factory=True))


def _key_value(value: Any) -> Any:
    if isinstance(value, Settings):
        return key_settings(value)
    if isinstance(value, dict):
        return {str(name): _key_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_key_value(item) for item in value]
    return value


def field_table(model: type[Settings], prefix: str = "") -> list[tuple[str, str, bool]]:
    """(dotted field, default as text, neutral) for every leaf field: what the committed key table is made of."""
    rows: list[tuple[str, str, bool]] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        nested = settings_types(field.annotation)
        default = field.get_default(call_default_factory=True)
        if nested and not is_neutral(field):
            if field.is_required() or not isinstance(default, Settings):
                rows.append((path, _default_text(default), False))
            for inner in nested:
                rows.extend(field_table(inner, f"{path}."))
        else:
            rows.append((path, _default_text(default), is_neutral(field)))
    return rows


def _default_text(default: Any) -> str:
    return "required" if default is PydanticUndefined else repr(default)


def settings_types(annotation: Any) -> list[type[Settings]]:
    """The settings models that a field's annotation admits: `Model`, `Model | None`, `tuple[Model, ...]`, ..."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return [model for part in get_args(annotation) for model in settings_types(part)]
    return []


def parse_settings(model: type[S], values: Any, where: str = "") -> S:
    """`values` as `model`, or SettingsError with every fault in one line, the nearest valid name for a misspelt one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [_fault(model, fault, where) for fault in error.errors(include_url=False)]
        raise SettingsError("; ".join(dict.fromkeys(faults))) from None


def _fault(model: type[Settings], fault: Any, where: str) -> str:
    location = list(fault["loc"])
    path = ".".join([where, *map(str, location)] if where else map(str, location))
    if fault["type"] == "extra_forbidden":
        allowed = sorted(_model_at(model, location[:-1]).model_fields)
        near = difflib.get_close_matches(str(location[-1]), allowed, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"allowed here: {', '.join(allowed)}"
        return f"{path}: unknown setting; {hint}"
    if fault["type"] == "missing":
        return f"{path}: missing, and it has no default; give it in the pipeline file or as set: {path}=VALUE"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not path:  # the whole file: the message names its parts
        return message
    given = repr(fault["input"])
    if isinstance(fault["input"], dict | list) or len(given) > 80:
        return f"{path}: {message}"
    return f"{path}: {message} (given {given})"


def _model_at(model: type[Settings], location: list[Any]) -> type[Settings]:
    for part in location:
        field = model.model_fields.get(str(part))
        nested = settings_types(field.annotation) if field else []
        if nested:
            model = nested[0]
    return model
