"""Commands of `rlhf` on a store: verify, gc, lineage."""

import json
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from flows.scratch import old_attempts, remove
from flows.terminal import one_line_errors
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store import gc as garbage
from rlhf_core.store import lineage as lineages
from rlhf_core.store.inventory import find_artifact
from rlhf_core.store.store import Store
from rlhf_core.store.verify import verify as findings_of
from stages.plan import plan_pipeline

STORE = ".rlhf/store"
SCRATCH = Path(".rlhf/scratch")
DAY_S = 86400.0
GIB = 2**30

Row = tuple[str, str, int, float, str]  # kind, path, bytes, when it was last written, why it can go

StoreOption = Annotated[str, typer.Option(help="Directory or s3:// URL of the store.")]


def verify(store: StoreOption = STORE) -> None:
    """Check every digest in the store. Names what is damaged, missing or foreign; exit code 1 if anything is."""
    checked = faults = unfinished = 0
    with one_line_errors():
        for finding in findings_of(Store(store)):
            checked += finding.problem == "ok"
            unfinished += finding.problem == "unfinished"
            if finding.fault:
                faults += 1
                typer.echo(f"{finding.problem}: {finding.path}: {finding.detail}")
    typer.echo(f"{checked} files verified, {faults} faults, {unfinished} unfinished attempts or checkpoints")
    raise typer.Exit(int(faults > 0))


def gc(
    store: StoreOption = STORE,
    older_than: Annotated[float, typer.Option(min=1 / 24, help="Days; what was written or used since is kept.")] = 30.0,
    keep: Annotated[list[str] | None, typer.Option(help="An artifact that stays, stage/key; repeatable.")] = None,
    pipeline: Annotated[
        list[Path] | None, typer.Option(help="A pipeline file, all of whose artifacts stay; repeatable.")
    ] = None,
    scratch: Annotated[Path, typer.Option(help="This machine's run.scratch, for what attempts left.")] = SCRATCH,
    delete: Annotated[bool, typer.Option("--delete", help="Do it. Else it is only said.")] = False,
) -> None:
    """Say what nothing refers to and is older than a limit; with --delete, delete it. Safe beside running stages."""
    with one_line_errors():
        opened = Store(store)
        pinned = {find_artifact(opened, name).key for name in keep or []}
        for file in pipeline or []:
            pinned |= {planned.key.key for planned in plan_pipeline(load_pipeline(file))}
        older_than_s = older_than * DAY_S
        find = garbage.collect if delete else garbage.find_garbage
        found = ((one.kind, one.path, one.size, one.modified, one.why) for one in find(opened, older_than_s, pinned))
        _say(chain(found, _scratch(scratch, opened, older_than_s, delete=delete)), deleted=delete)


def _scratch(scratch: Path, store: Store, older_than_s: float, *, delete: bool) -> Iterator[Row]:
    for one in old_attempts(scratch, store, older_than_s):
        if delete:
            remove(one)
        yield "scratch", str(one.path), one.size, one.modified, "of an attempt that has ended"


def _say(found: Iterable[Row], *, deleted: bool) -> None:
    size = count = 0
    for kind, path, bytes_, modified, why in found:
        days = (time.time() - modified) / DAY_S
        typer.echo(f"{kind}: {path}: {bytes_ / GIB:.3f} GiB, {days:.0f} days old: {why}")
        size, count = size + bytes_, count + 1
    done = "deleted" if deleted else "to delete; nothing was deleted, --delete does it"
    typer.echo(f"{count} objects, {size / GIB:.3f} GiB {done}")


def lineage(
    artifact: Annotated[str, typer.Argument(help="stage/key or the beginning of a key; or a model's directory.")],
    store: StoreOption = STORE,
    svg: Annotated[Path | None, typer.Option(help="A file for the picture.")] = None,
) -> None:
    """Where an artifact comes from: every manifest back to data and settings, as JSON; with --svg, a picture too."""
    with one_line_errors():
        found_in, manifest = lineages.find_manifest(artifact, Store(store))
        shown = lineages.lineage(found_in, manifest)
        if svg is not None:
            svg.write_text(lineages.to_svg(shown), encoding="utf-8")
        typer.echo(json.dumps(shown.to_json(), indent=2, ensure_ascii=False))
