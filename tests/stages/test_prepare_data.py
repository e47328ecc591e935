"""What prepare-data says of the rows that it did not take over."""

import json
import subprocess
import sys
from pathlib import Path

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline


def test_pairs_of_equal_responses_are_counted_in_the_report_and_the_metrics(project: Path, tmp_path: Path) -> None:
    for name, pairs in (("train", ("xy", "zz", "yx")), ("heldout", ("xy", "xx", "yy"))):
        rows = [{"prompt": "p", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{path: {tmp_path}/train.jsonl, eval_path: {tmp_path}/heldout.jsonl}}"
    pipeline = load_pipeline(
        project / "deployments" / "pipelines" / "demo.yaml",
        [f"data.pairs={source}", f"run.store={tmp_path}/store", f"run.scratch={tmp_path}/scratch"],
    )
    planned = next(planned for planned in plan_pipeline(pipeline) if planned.node == "data-pairs")
    spec = {
        "stage": planned.stage.name,
        "node": "data-pairs",
        "settings": planned.settings.model_dump(mode="json"),
        "key": planned.key.key,
        "key_source": planned.key.source,
        "inputs": {},
        "run": pipeline.run.model_dump(mode="json"),
        "scratch": f"{tmp_path}/scratch/one",
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "stages.prepare_data", "--spec", str(tmp_path / "spec.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    store = Store(f"{tmp_path}/store")
    manifest = read_manifest(store, "prepare-data", planned.key.key)
    assert manifest is not None
    counts = {"rows": 2, "eval_rows": 1, "rows_dropped_equal": 1, "eval_rows_dropped_equal": 2}
    assert manifest.metrics == counts
    report = json.loads((fetch(store, manifest, tmp_path / "out") / "data_report.json").read_text())
    assert counts.items() <= report.items()
