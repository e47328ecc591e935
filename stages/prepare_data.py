"""prepare-data: one data set, generated or read, as rows.jsonl (and eval.jsonl) with the project's column names."""

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

from rlhf_core.config.data import PrepareDataSettings
from rlhf_core.data.rows import drop_equal_pairs, load_rows, write_jsonl
from stages.definition import Stage, StageContext, StageResult
from stages.inputs import check_unchanged, data_fingerprints


def prepare_data(context: StageContext) -> StageResult:
    settings: PrepareDataSettings = context.settings
    context.events.phase(f"preparing {settings.dataset}")
    rows, held_out = load_rows(settings.dataset, settings.source)
    dropped: dict[str, int] = {}
    if settings.dataset == "pairs":
        rows, dropped["rows_dropped_equal"] = drop_equal_pairs(rows)
        held_out, dropped["eval_rows_dropped_equal"] = drop_equal_pairs(held_out)
    # After reading: what was read is then no newer than what is compared.
    prints = data_fingerprints(settings.dataset, settings.source)
    check_unchanged(f"data.{settings.dataset}", prints, context.key_source["data"])
    files = context.files
    write_jsonl(files / "rows.jsonl", rows)
    if held_out:
        write_jsonl(files / "eval.jsonl", held_out)
    counts = {"rows": len(rows), "eval_rows": len(held_out), **dropped}
    report = {"dataset": settings.dataset, **counts, "example": rows[0]}
    report["characters"] = _length_quantiles(rows)
    (files / "data_report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False))
    with closing(context.history()) as history:
        history.add(0, counts, phase="data")
    context.events.progress(1, 1, "preparing")
    digests = {name: _sha256(files / name) for name in ("rows.jsonl", "eval.jsonl") if (files / name).exists()}
    return StageResult(
        files=files,
        metrics=counts,
        data={"dataset": settings.dataset, **counts, "sha256": digests},
        summary=_summary(report),
    )


def _length_quantiles(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Characters in a row, over all of its columns."""
    lengths = sorted(sum(len(str(value)) for value in row.values()) for row in rows)
    return {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _summary(report: dict[str, Any]) -> str:
    lengths = report["characters"]
    columns = "\n".join(f"| {name} | `{value}` |" for name, value in report["example"].items())
    return (
        f"**{report['dataset']}**: {report['rows']} rows, {report['eval_rows']} held out; "
        f"{lengths['min']} / {lengths['median']} / {lengths['max']} characters (min / median / max)\n\n"
        f"| column | first row |\n|---|---|\n{columns}\n"
    )


PREPARE_DATA = Stage(
    name="prepare-data",
    version=1,
    module="stages.prepare_data",
    settings=PrepareDataSettings,
    pool="cpu",
    run=prepare_data,
)

if __name__ == "__main__":
    from stages.runner import main

    main(PREPARE_DATA)
