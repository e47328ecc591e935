"""prepare-data: one data set, generated or read, as rows.jsonl (and eval.jsonl) with the project's column names."""

import hashlib
import json
from pathlib import Path
from typing import Any

from rlhf_core.config.data import PrepareDataSettings
from rlhf_core.data.rows import load_rows, write_jsonl
from stages.definition import Stage, StageContext, StageResult


def prepare_data(context: StageContext) -> StageResult:
    settings: PrepareDataSettings = context.settings
    context.events.phase(f"preparing {settings.dataset}")
    rows, held_out = load_rows(settings.dataset, settings.source)
    files = context.scratch / "artifact"
    write_jsonl(files / "rows.jsonl", rows)
    if held_out:
        write_jsonl(files / "eval.jsonl", held_out)
    report = {"dataset": settings.dataset, "rows": len(rows), "eval_rows": len(held_out), "example": rows[0]}
    report["characters"] = _length_quantiles(rows)
    (files / "data_report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False))
    context.events.progress(1, 1, "preparing")
    digests = {name: _sha256(files / name) for name in ("rows.jsonl", "eval.jsonl") if (files / name).exists()}
    return StageResult(
        files=files,
        metrics={"rows": len(rows), "eval_rows": len(held_out)},
        data={"dataset": settings.dataset, "rows": len(rows), "eval_rows": len(held_out), "sha256": digests},
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
