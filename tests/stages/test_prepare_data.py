"""prepare-data as a process: its artifact, its report, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.store import Store
from stages.inputs import check_unchanged, data_fingerprints
from stages.plan import PlannedStage, plan_pipeline


@pytest.fixture
def planned(project: Path, tmp_path: Path):
    def one(kind: str, *overrides: str) -> PlannedStage:
        base = [f"run.store={tmp_path}/store", f"run.scratch={tmp_path}/scratch"]
        pipeline = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", [*base, *overrides])
        return next(node for node in plan_pipeline(pipeline) if node.node == f"data-{kind}")

    return one


@pytest.fixture
def artifact(tmp_path: Path):
    def of(planned: PlannedStage) -> tuple[Any, Path]:
        """(manifest, directory) of what the stage's own process publishes."""
        spec = {
            "stage": planned.stage.name,
            "node": planned.node,
            "settings": planned.settings.model_dump(mode="json"),
            "key": planned.key.key,
            "key_source": planned.key.source,
            "inputs": {},
            "run": {"store": f"{tmp_path}/store", "scratch": f"{tmp_path}/scratch"},
            "scratch": f"{tmp_path}/scratch/one",
        }
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        command = [sys.executable, "-m", "stages.prepare_data", "--spec", str(tmp_path / "spec.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        store = Store(f"{tmp_path}/store")
        manifest = read_manifest(store, "prepare-data", planned.key.key)
        assert manifest is not None
        return manifest, fetch(store, manifest, tmp_path / "out")

    return of


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_of_equal_responses_are_counted_in_the_report_and_the_metrics(planned, artifact, tmp_path: Path) -> None:
    for name, pairs in (("train", ("xy", "zz", "yx")), ("heldout", ("xy", "xx", "yy"))):
        rows = [{"prompt": "p", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{path: {tmp_path}/train.jsonl, eval_path: {tmp_path}/heldout.jsonl}}"
    manifest, files = artifact(planned("pairs", f"data.pairs={source}"))
    counts = {"rows": 2, "eval_rows": 1, "rows_dropped": 1, "eval_rows_dropped": 2}
    assert counts.items() <= manifest.metrics.items()
    report = json.loads((files / "data_report.json").read_text())
    assert counts.items() <= report.items()
    reason = "chosen equals rejected"
    assert report["sources"][0]["dropped"] == {reason: {"items": 1, "first_row": 2, "first": reason}}


def test_a_mixture_of_a_file_and_a_loader_with_a_held_out_share(planned, artifact, tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    loader = f"def load_rows(split):\n    return [{{'messages': {said!r}}}] if split == 'train' else []"
    (tmp_path / "b.py").write_text(loader)
    sources = (
        f"{{sources: [{{path: {tmp_path}/a.json, eval_share: 0.3, probability: 0.9, "
        f"columns: {{prompt: question, response: answer}}}}, {{path: {tmp_path}/b.py, probability: 0.1}}]}}"
    )
    manifest, files = artifact(planned("sft", f"data.sft={sources}"))
    written, held_out = rows_of(files / "rows.jsonl"), rows_of(files / "eval.jsonl")
    assert (len(written), len(held_out)) == (manifest.metrics["rows"], manifest.metrics["eval_rows"])
    questions = {row["prompt"] for row in written if "prompt" in row}
    assert questions | {row["prompt"] for row in held_out} == {row["question"] for row in rows}
    assert not questions & {row["prompt"] for row in held_out}
    assert {"messages": said} in written
    assert (files / "plots" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((files / "data_report.json").read_text())
    assert [source["shape"] for source in report["sources"]] == ["prompt", "messages (role/content)"]


def test_a_loader_enters_the_key_by_its_content(planned, tmp_path: Path) -> None:
    def key(name: str, loader: str) -> str:
        (tmp_path / name).write_text(loader)
        return planned("sft", f"data.sft={{path: {tmp_path / name}}}").key.key

    first = key("a.py", "def load_rows(split): ...")
    assert key("b.py", "def load_rows(split): ...") == first
    assert key("a.py", "def load_rows(split): pass") != first


def test_every_part_of_a_mixture_is_fingerprinted_under_its_own_name(planned, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    (tmp_path / "a.jsonl").write_text("{}")
    path = f"{tmp_path}/a.jsonl"
    parts = f"{{path: {path}, eval_path: {path}, eval_split: test}}, {{hub: org/name, revision: '{commit}'}}"
    node = planned("sft", f"data.sft={{sources: [{parts}, {{arithmetic: {{rows: 2}}}}]}}")
    prints = node.key.source["data"]
    assert set(prints) == {"sources.0.path", "sources.0.eval_path", "sources.1.hub", "sources.2.generator"}
    assert prints["sources.1.hub"] == commit
    (tmp_path / "a.jsonl").write_text("{ }")
    with pytest.raises(SettingsError, match=r"data\.sft\.sources\.0\.path is not what this run was planned with"):
        check_unchanged("data.sft", data_fingerprints("sft", node.settings.source), prints)  # type: ignore[attr-defined]


def test_a_folder_enters_by_the_content_of_its_files(planned, tmp_path: Path) -> None:
    import datasets

    def key(name: str, rows: list[dict[str, str]]) -> str:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name)
        return planned("sft", f"data.sft={{path: {tmp_path / name}}}").key.key

    assert key("a", [{"text": "x"}]) != key("b", [{"text": "y"}])


def test_a_hub_that_is_out_of_reach_is_one_line_before_anything_starts(planned) -> None:
    with pytest.raises(SettingsError) as caught:
        planned("sft", "data.sft={hub: org/name}")
    assert str(caught.value).startswith("data.sft.hub: data set org/name cannot be read: ")
    assert "a commit as `revision`" in str(caught.value)
    assert "\n" not in str(caught.value)
