"""From an artifact back to its data and settings: every manifest on the way, as JSON and as one SVG."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.inventory import find_artifact, stage_keys
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store, StoreError

# The figure that says most, the first of which an artifact has.
MAIN_METRICS = (
    *("exact_match/ppo", "exact_match/kto", "exact_match/dpo", "exact_match/last", "exact_match/sft"),
    *("reward/last", "eval/accuracy", "eval/loss", "last_loss", "rows"),
)
_BOX = (210, 74)
_GAP = (110, 26)
_MARGIN = 20


@dataclass(frozen=True)
class Edge:
    """`source` and `target`: stage/key; source may be the digest or commit of a model from outside."""

    source: str
    target: str
    name: str


@dataclass(frozen=True)
class Lineage:
    """artifacts: stage/key -> manifest, the one asked for first. outside: digests and commits of models that the store
    did not make, or artifacts that it has no more."""

    top: str
    artifacts: Mapping[str, Manifest]
    outside: tuple[str, ...]
    edges: tuple[Edge, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": self.top,
            "artifacts": {name: manifest.model_dump(mode="json") for name, manifest in self.artifacts.items()},
            "outside": list(self.outside),
            "edges": [{"from": edge.source, "to": edge.target, "input": edge.name} for edge in self.edges],
        }


def find_manifest(wanted: str, store: Store) -> tuple[Store, Manifest]:
    """The artifact that `wanted` names, and the store it is in: stage/key, the beginning of a key, or a directory with
    our manifest.json in it or up to two levels above, such as a model's directory in a store.

    Raises StoreError where there is none.
    """
    directory = Path(wanted).absolute()
    if not directory.is_dir():
        return store, find_artifact(store, wanted)
    for place in (directory, *list(directory.parents)[:2]):
        file = place / "manifest.json"
        if file.is_file():
            try:
                manifest = Manifest.model_validate_json(file.read_bytes())
            except ValidationError:
                break
            inside = place.parts[-3:] == ("artifacts", manifest.stage, manifest.key)
            return (Store(str(place.parents[2])) if inside else store), manifest
    raise StoreError(f"{wanted} has no manifest.json of ours; give a directory in a store, or stage/key")


def lineage(store: Store, manifest: Manifest) -> Lineage:
    """Raises StoreError for a manifest on the way that cannot be read."""
    stages = {key: stage for stage, key in stage_keys(store, "artifacts")}
    artifacts: dict[str, Manifest] = {}
    outside: dict[str, None] = {}
    edges: list[Edge] = []
    left = [manifest]
    while left:
        one = left.pop(0)
        target = _name(one)
        if target in artifacts:
            continue
        artifacts[target] = one
        for name, key in sorted(one.inputs.items()):
            made = read_manifest(store, stages[key], key) if key in stages else None
            if made is None:
                outside[key] = None
            else:
                left.append(made)
            edges.append(Edge(key if made is None else _name(made), target, name))
    return Lineage(_name(manifest), artifacts, tuple(outside), tuple(edges))


def _name(manifest: Manifest) -> str:
    return f"{manifest.stage}/{manifest.key}"


def main_metric(manifest: Manifest) -> str:
    """`eval/accuracy 0.968`, or '' where there is none that says much."""
    for name in MAIN_METRICS:
        value = manifest.metrics.get(name)
        if isinstance(value, int | float):
            return f"{name} {value:.4g}"
    return ""


def to_svg(shown: Lineage) -> str:
    """Boxes in columns, what was read on the left of what was made of it; on each arrow, which input it is."""
    columns = _columns(shown)
    at: dict[str, tuple[int, int]] = {}
    for number, column in enumerate(columns):
        # Every other column is lower: an arrow past one box of a chain does not run behind it. Data are the lowest.
        first = 2 if number == 0 and len(columns) > 1 else (number + 1) % 2
        for row, name in enumerate(column, first):
            at[name] = (_MARGIN + number * (_BOX[0] + _GAP[0]), _MARGIN + row * (_BOX[1] + _GAP[1]))
    width = max(x for x, _ in at.values()) + _BOX[0] + _MARGIN
    height = max(y for _, y in at.values()) + _BOX[1] + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *(_arrow(at[edge.source], at[edge.target], edge.name, place) for edge, place in _placed(shown.edges)),
        *(_box(place, _lines(name, shown.artifacts.get(name)), name == shown.top) for name, place in at.items()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _columns(shown: Lineage) -> list[list[str]]:
    """Names by how many steps at most lie between them and what has no inputs."""
    depth: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in depth:
            depth[name] = max((of(edge.source) + 1 for edge in shown.edges if edge.target == name), default=0)
        return depth[name]

    columns: list[list[str]] = [[] for _ in range(of(shown.top) + 1)]
    for name in [*shown.artifacts, *shown.outside]:
        columns[of(name)].append(name)
    return columns


def _placed(edges: tuple[Edge, ...]) -> list[tuple[Edge, float]]:
    """Each with the share of the box's height at which it arrives, so that those of one box do not meet."""
    targets = [edge.target for edge in edges]
    places = ((targets[:n].count(one) + 1) / (targets.count(one) + 1) for n, one in enumerate(targets))
    return list(zip(edges, places, strict=True))


def _arrow(source: tuple[int, int], target: tuple[int, int], name: str, place: float) -> str:
    x1, y1 = source[0] + _BOX[0], source[1] + _BOX[1] / 2
    x2, y2 = target[0], target[1] + _BOX[1] * place
    bend = _GAP[0] * 0.6
    return (
        f'<path d="M{x1},{y1:.0f} C{x1 + bend:.0f},{y1:.0f} {x2 - bend:.0f},{y2:.0f} {x2},{y2:.0f}" fill="none" '
        f'stroke="#555" marker-end="url(#tip)"/>'
        f'<text x="{x2 - 12}" y="{y2 - 4:.0f}" text-anchor="end" font-size="10" fill="#555">{escape(name)}</text>'
    )


def _lines(name: str, manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["from outside", name[:12]]
    dataset = manifest.data.get("dataset")
    title = f"{manifest.stage} ({dataset})" if dataset else manifest.stage
    return [title, manifest.key[:12], manifest.created_at[:10], main_metric(manifest)]


def _box(place: tuple[int, int], lines: list[str], top: bool) -> str:
    x, y = place
    texts = "".join(
        f'<text x="{x + 10}" y="{y + 17 + 16 * n}"{" font-weight=" + chr(34) + "bold" + chr(34) if n == 0 else ""}>'
        f"{escape(line)}</text>"
        for n, line in enumerate(lines)
    )
    fill = "#dbeafe" if top else "#f3f4f6"
    return f'<rect x="{x}" y="{y}" width="{_BOX[0]}" height="{_BOX[1]}" rx="6" fill="{fill}" stroke="#555"/>{texts}'
