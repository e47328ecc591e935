"""Why a run would make a stage anew, and what it would reuse: each stage's key against what the store holds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import PydanticUndefined

from rlhf_core.config.base import Settings, is_neutral, key_default, settings_types
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.checkpoints import newest_complete
from rlhf_core.store.inventory import published
from rlhf_core.store.leases import holder
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from stages.plan import PlannedStage
from stages.prepare_data import PREPARE_DATA

State = Literal["reused", "resumed", "to run"]
ABSENT = PydanticUndefined  # a leaf that one of the two sides does not have
SHOWN_CHANGES = 8
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Change:
    """One leaf in which two keys' sources differ. `what` is its name as a user knows it: `ppo.optimizer.lr`."""

    kind: Literal["version", "setting", "input", "data", "code", "salt"]
    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Explained:
    """What a run would do with a stage. `changes`: against `nearest`, the published artifact that is most like it."""

    planned: PlannedStage
    state: State
    step: int | None
    nearest: Manifest | None
    changes: tuple[Change, ...]
    reason: str


def explain(plan: Sequence[PlannedStage], store: Store) -> list[Explained]:
    """In the order of the plan. Reads manifests and the markers of training checkpoints; starts nothing.

    Raises StoreError where a manifest under a key of the plan cannot be read.
    """
    explained: dict[str, Explained] = {}
    others: dict[str, list[Manifest]] = {}
    for planned in plan:
        stage, key = planned.stage.name, planned.key.key
        manifest = read_manifest(store, stage, key)
        if manifest is not None:
            reason = f"made {_origin(manifest)}"
            explained[planned.node] = Explained(planned, "reused", None, manifest, (), reason)
            continue
        if stage not in others:
            others[stage] = list(published(store, stage))
        states: dict[str, tuple[str, State]] = {
            name: (node, explained[node].state) for name, node in planned.inputs.items()
        }
        nearest, found = nearest_artifact(planned, others[stage])
        reason = _why_not_there(planned, nearest, found, states)
        checkpoint, _ = newest_complete(store, stage, key)
        if checkpoint is not None:
            reason = f"goes on from the training checkpoint of step {checkpoint.step}; {reason}"
        lease = holder(store, stage, key)
        if lease is not None and lease.alive:
            reason = f"being made now on {lease.owner.get('host', 'another machine')}; {reason}"
        state: State = "to run" if checkpoint is None else "resumed"
        step = None if checkpoint is None else checkpoint.step
        explained[planned.node] = Explained(planned, state, step, nearest, tuple(found), reason)
    return list(explained.values())


def nearest_artifact(planned: PlannedStage, manifests: Sequence[Manifest]) -> tuple[Manifest | None, list[Change]]:
    """The one with the fewest changes to `planned`, the newest of equals; of a data set only its own kind counts."""
    found = [(m, key_changes(planned, m.key_source)) for m in manifests if _comparable(planned, m)]
    found.sort(key=lambda one: one[0].created_at, reverse=True)
    return min(found, key=lambda one: len(one[1]), default=(None, []))


def _comparable(planned: PlannedStage, manifest: Manifest) -> bool:
    if planned.stage is not PREPARE_DATA:
        return True
    settings = manifest.key_source.get("settings")
    return isinstance(settings, dict) and settings.get("dataset") == planned.key.source["settings"]["dataset"]


def key_changes(planned: PlannedStage, before: Mapping[str, Any]) -> list[Change]:
    """Every leaf in which the source of the planned key differs from `before`, that of another key of the stage."""
    node, after = planned.node, planned.key.source
    changes: list[Change] = []
    if before.get("version") != after["version"]:
        changes.append(Change("version", f"{planned.stage.name}'s version", before.get("version"), after["version"]))
    model = planned.stage.settings
    changes += [
        Change("setting", _setting_name(node, path), old, new)
        for path, old, new in _differences(model, before.get("settings") or {}, after["settings"], "")
    ]
    for kind in ("input", "data", "code"):
        section = kind if kind != "input" else "inputs"
        old, new = before.get(section) or {}, after[section]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                what = f"input {name}" if kind == "input" else f"{node.replace('data-', 'data.', 1)}.{name}"
                changes.append(Change(kind, what, old.get(name, ABSENT), new.get(name, ABSENT)))
    if before.get("salt") != after.get("salt"):
        changes.append(Change("salt", "force", before.get("salt", ABSENT), after.get("salt", ABSENT)))
    return changes


def _setting_name(node: str, path: str) -> str:
    """data-sft, source.arithmetic.rows -> data.sft.arithmetic.rows, as it is called in a pipeline file."""
    if node.startswith("data-"):
        return f"data.{node.removeprefix('data-')}.{path.removeprefix('source.')}"
    return f"{node}.{path}"


def _differences(
    model: type[Settings] | None, before: Mapping[str, Any], after: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, before, after) of the leaves that differ; what `key_settings` left out is at its default.

    model: whose settings they are; None for a mapping of the user's. A value against settings is one leaf, and so are
    lists of different length.
    """
    fields = {} if model is None else {n: f for n, f in model.model_fields.items() if not is_neutral(f)}
    for name in [*fields, *sorted((before.keys() | after.keys()) - fields.keys())]:
        default = key_default(fields[name]) if name in fields else ABSENT
        old, new = before.get(name, default), after.get(name, default)
        if old == new and (name in before) == (name in after):
            continue
        nested = settings_types(fields[name].annotation) if name in fields else []
        yield from _leaf_differences(nested, old, new, f"{prefix}{name}")


def _leaf_differences(nested: list[type[Settings]], old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        model = next((m for m in nested if set(m.model_fields) >= old.keys() | new.keys()), None)
        yield from _differences(model, old, new, f"{path}.")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and nested:
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _leaf_differences(nested, one, other, f"{path}.{number}")
    elif old != new:
        yield path, old, new


def _why_not_there(
    planned: PlannedStage,
    nearest: Manifest | None,
    changes: Sequence[Change],
    inputs: Mapping[str, tuple[str, State]],
) -> str:
    if nearest is None:
        what = planned.node if planned.stage is PREPARE_DATA else planned.stage.name
        return f"the store has nothing of {what}"
    words = [described(change, inputs) for change in changes[:SHOWN_CHANGES]]
    if len(changes) > SHOWN_CHANGES:
        words.append(f"{len(changes) - SHOWN_CHANGES} more")
    # Settings that are equal now, but of which one was left out when it was the default.
    said = "; ".join(words) or "the defaults of its settings"
    return f"{said} (against {nearest.key[:12]}, made {_origin(nearest)})"


def described(change: Change, inputs: Mapping[str, tuple[str, State]]) -> str:
    """A change in words. inputs: input name -> (node, its state), of those that the plan makes."""
    before, after = change.before, change.after
    if change.kind == "input":
        return _described_input(change, inputs)
    if before is ABSENT or after is ABSENT:
        verb = "new" if before is ABSENT else "gone"
        value = _short(after if before is ABSENT else before)
        return f"{change.what} {verb}" + (f" ({value})" if change.kind == "setting" else "")
    if change.kind in ("data", "code") and _is_digest(before) and _is_digest(after):
        return f"{change.what}: content changed"
    return f"{change.what} {_short(before)} -> {_short(after)}"


def _described_input(change: Change, inputs: Mapping[str, tuple[str, State]]) -> str:
    name = change.what.removeprefix("input ")
    if change.after is ABSENT:
        return f"{change.what} is not read any more"
    if name not in inputs:
        return f"{change.what}: content changed" if change.before is not ABSENT else f"{change.what} is new"
    node, state = inputs[name]
    if state == "reused":
        return f"{change.what}: another {node}, {change.after[:12]}"
    return f"{change.what}: {node} is {'to run' if state == 'to run' else 'to be finished'}"


def _origin(manifest: Manifest) -> str:
    run = manifest.flow_run.get("name") or manifest.flow_run.get("id")
    return f"{manifest.created_at[:10]} by {f'run {run}' if run else 'a run without Prefect'}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) in (40, 64) and set(value) <= set("0123456789abcdef")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def counts(explained: Sequence[Explained]) -> str:
    """`2 to run, 1 resumed, 6 reused`."""
    states = [one.state for one in explained]
    return ", ".join(f"{states.count(state)} {state}" for state in ("to run", "resumed", "reused"))
