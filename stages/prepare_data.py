"""prepare-data: one data set, generated, read or mixed, as rows.jsonl (and eval.jsonl) in canonical form."""

import json
from contextlib import closing
from typing import Any

from rlhf_core.config.data import PrepareDataSettings
from rlhf_core.data.loading import LoadedData, load_data
from rlhf_core.data.report import counts_of, data_report, plot_lengths, summary_markdown
from rlhf_core.data.rows import write_jsonl
from rlhf_core.store.keys import sha256_file
from stages.definition import Stage, StageContext, StageResult
from stages.inputs import check_unchanged, data_fingerprints


def prepare_data(context: StageContext) -> StageResult:
    settings: PrepareDataSettings = context.settings
    context.events.phase(f"preparing {settings.dataset}")
    data = load_data(settings.dataset, settings.source)
    # After reading: what was read is then no newer than what is compared.
    prints = data_fingerprints(settings.dataset, settings.source)
    check_unchanged(f"data.{settings.dataset}", prints, context.key_source["data"])
    report = data_report(settings.dataset, data)
    digests = _write(context, data, report)
    counts = counts_of(report)
    with closing(context.history()) as history:
        history.add(0, counts, phase="data")
    context.events.progress(1, 1, "preparing")
    return StageResult(
        files=context.files,
        metrics=counts,
        data={"dataset": settings.dataset, **counts, "sha256": digests},
        summary=summary_markdown(report),
    )


def _write(context: StageContext, data: LoadedData, report: dict[str, Any]) -> dict[str, str]:
    """Writes the artifact's files; returns {file of rows: SHA-256}."""
    files = context.files
    parts = {"rows.jsonl": data.rows} | ({"eval.jsonl": data.held_out} if data.held_out else {})
    for name, rows in parts.items():
        write_jsonl(files / name, rows)
    (files / "data_report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
    plot_lengths(files / "plots" / "lengths.png", report)
    return {name: sha256_file(files / name) for name in parts}


PREPARE_DATA = Stage(
    name="prepare-data",
    version=4,
    module="stages.prepare_data",
    settings=PrepareDataSettings,
    pool="cpu",
    run=prepare_data,
)

if __name__ == "__main__":
    from stages.runner import main

    main(PREPARE_DATA)
