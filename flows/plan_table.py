"""The plan as a table, for the terminal and as markdown."""

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table

from stages.reasons import Explained, counts
from stages.resources import GIB, Resources, Role


def plan_tables(explained: Sequence[Explained], takes: Mapping[str, Resources]) -> Group:
    """For the terminal: what happens and why; below it, what that takes."""
    why = Table("stage", "key", "", "why")
    taken = Table("stage", "accelerators", "memory on each, without activations", "disk")
    for one in explained:
        node = one.planned.node
        why.add_row(node, one.planned.key.key[:12], state(one), one.reason)
        if one.state != "reused":
            taken.add_row(node, *_taken(takes[node]))
    return Group(why, *([taken] if taken.row_count else []), counts(explained))


def plan_markdown(explained: Sequence[Explained], takes: Mapping[str, Resources]) -> str:
    lines = [
        "| stage | key | | why | accelerators | memory on each, without activations | disk |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in explained:
        node = one.planned.node
        taken = _taken(takes[node]) if one.state != "reused" else ("", "", "")
        cells = [node, f"`{one.planned.key.key[:12]}`", state(one), one.reason, *taken]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, "", counts(explained), ""])


def state(one: Explained) -> str:
    return f"resumed at step {one.step}" if one.state == "resumed" else one.state


def _taken(resources: Resources) -> tuple[str, str, str]:
    memory = ", ".join(f"{_role_name(role)} {_gib(role.bytes)}" for role in resources.memory)
    disk = "" if resources.disk == 0 else _gib(resources.disk)
    return str(resources.accelerators), memory, disk


def _role_name(role: Role) -> str:
    return f"{role.name} (host)" if role.host else role.name


def _gib(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
