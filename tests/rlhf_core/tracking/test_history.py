import json
import math
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.tracking.events import EventLog, read_events
from rlhf_core.tracking.history import History
from rlhf_core.tracking.plots import plot_curves


def history(tmp_path, **tracking):
    events = EventLog(tmp_path / "events.jsonl")
    return History(tmp_path / "a", events, TrackingSettings(**tracking), run_name="sft-abc", config={"lr": 0.1})


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]


def wandb_records(content):
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; crc, length, type) after 7 bytes."""
    at, pending = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        pending += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield pending
            pending = b""


def test_records_go_to_the_file_to_events_and_to_curves(tmp_path):
    h = history(tmp_path)
    h.add(1, {"loss": 2.0})
    h.add(2, {"loss": 1.0})
    h.add(2, {"loss": 1.5}, phase="eval")
    assert h.curve("loss") == ([1, 2], [2.0, 1.0])
    assert h.curve("loss", "eval") == ([2], [1.5])
    assert h.curve("none") == ([], [])
    assert lines(tmp_path) == h.records
    assert [e["values"] for e in read_events(tmp_path / "events.jsonl")] == [
        {"loss": 2.0},
        {"loss": 1.0},
        {"loss": 1.5},
    ]


def test_a_resumed_history_has_no_gap_and_nothing_twice(tmp_path):
    first = history(tmp_path / "first")
    for step in (1, 2, 3):
        first.add(step, {"loss": float(step)})
    resumed = history(tmp_path)
    resumed.replace(first.records[:2], [])
    resumed.add(3, {"loss": 3.0})
    assert resumed.curve("loss") == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert lines(tmp_path) == resumed.records


def test_samples_travel_with_a_checkpoint(tmp_path):
    """What a checkpoint keeps is strict JSON and gives the samples that an uninterrupted run has."""

    def show(h, steps):
        for step in steps:
            h.add_sample(step, prompt="1+1=", response=f"{step}", label="2", reward=float("nan") if step == 1 else 0.5)

    straight, first, resumed = (history(tmp_path / name) for name in ("straight", "first", "resumed"))
    show(straight, (1, 2, 3))
    show(first, (1, 2))
    kept = json.loads(json.dumps({"records": first.records, "samples": first.samples}, allow_nan=False))
    resumed.replace(kept["records"], kept["samples"])
    show(resumed, (3,))
    assert resumed.samples == straight.samples
    assert straight.samples[1] == {"step": 2, "prompt": "1+1=", "response": "2", "label": "2", "reward": 0.5}
    shown = [e["response"] for e in read_events(tmp_path / "straight" / "events.jsonl") if e["type"] == "sample"]
    assert shown == ["1", "2", "3"]


def test_generations_of_the_same_prompts_travel_with_a_checkpoint_too(tmp_path):
    rows = [{"prompt": "1+1=", "response": "2#2"}, {"prompt": "a|b", "response": "`x`\ny"}]
    first, resumed = history(tmp_path / "first"), history(tmp_path, tensorboard=True)
    for step in (0, 5):
        first.add_generations(step, rows)
    resumed.replace(first.records, first.samples, json.loads(json.dumps(first.generations[:2])))
    resumed.add_generations(5, rows)
    resumed.close()
    assert resumed.generations == first.generations == [{"step": step, **row} for step in (0, 5) for row in rows]
    accumulator = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    accumulator.Reload()
    shown = accumulator.Tensors("generations/text_summary")
    assert [one.step for one in shown] == [0, 5]
    assert shown[1].tensor_proto.string_val[0].decode() == (
        "| step | prompt | response |\n| --- | --- | --- |\n| 5 | `1+1=` | `2#2` |\n| 5 | `a\\|b` | `'x' y` |\n"
    )


def test_a_nan_metric_is_kept_by_name_and_shown_as_what_it_is(tmp_path):
    first = history(tmp_path / "first", tensorboard=True)
    for step, loss in enumerate((1.0, math.nan, math.inf), start=1):
        first.add(step, {"loss": loss})
    assert [r["loss"] for r in lines(tmp_path / "first")] == [1.0, "nan", "inf"]
    kept = json.loads(json.dumps(first.records, allow_nan=False))
    resumed = history(tmp_path, tensorboard=True)
    resumed.replace(kept, [])
    resumed.add(4, {"loss": 2.0})
    steps, losses = resumed.curve("loss")
    assert steps == [1, 2, 3, 4]
    assert (losses[0], losses[2], losses[3]) == (1.0, math.inf, 2.0)
    assert math.isnan(losses[1])
    plot_curves(tmp_path / "loss.png", "loss", {"loss": (steps, losses)})
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_holds_the_same_curve(tmp_path):
    h = history(tmp_path, tensorboard=True)
    h.add(1, {"loss": 2.0})
    h.add(5, {"loss": 1.0})
    h.close()
    accumulator = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("train/loss")] == [(1, 2.0), (5, 1.0)]


def test_every_nth_training_step_and_every_evaluation_is_tracked_and_all_are_kept(tmp_path):
    first = history(tmp_path / "first")
    for step in range(1, 5):
        first.add(step, {"loss": float(step)})
    h = history(tmp_path, tensorboard=True, every_steps=3)
    h.replace(first.records, [])
    for step in range(5, 8):
        h.add(step, {"loss": float(step)})
        h.add(step, {"loss": float(-step)}, phase="eval")
    h.close()
    accumulator = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    accumulator.Reload()
    assert [e.step for e in accumulator.Scalars("train/loss")] == [3, 6]
    assert [e.step for e in accumulator.Scalars("eval/loss")] == [5, 6, 7]
    assert h.curve("loss")[0] == [1, 2, 3, 4, 5, 6, 7]
    assert lines(tmp_path) == h.records


SHORT_RUN = """
import sys
from pathlib import Path
from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.tracking.events import EventLog
from rlhf_core.tracking.history import History
directory = Path(sys.argv[1])
tracking = TrackingSettings(
    wandb_project="rlhf-test", wandb_entity="team", wandb_group="sweep", run_name="try-1", every_steps=5
)
h = History(directory / "a", EventLog(directory / "e.jsonl"), tracking, run_name="sft-abc", config={"lr": 0.1})
h.add(1, {"loss": 3.0})
h.add(5, {"loss": 2.0})
print("printed by the driver")
h.add(7, {"loss": 1.5}, phase="eval")
h.add(10, {"loss": 1.0})
h.add_generations(10, [{"prompt": "1+1=", "response": "2"}])
h.close()
"""


@pytest.fixture
def wandb_run(tmp_path):
    """(directory of the W&B files, their records) of a short offline run whose process prints while it is open."""
    subprocess.run([sys.executable, "-c", SHORT_RUN, str(tmp_path)], check=True, timeout=120)
    directory = tmp_path / "a" / "wandb"
    (file,) = directory.glob("offline-run-*/run-*.wandb")
    records = []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return directory, records


def test_an_offline_wandb_run_holds_its_share_of_the_curve_the_settings_its_names_and_generations(wandb_run):
    directory, records = wandb_run
    rows = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    (run,) = [record.run for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, run.entity, run.run_group) == ("rlhf-test", "team", "sweep")
    assert run.display_name == "try-1-sft-abc"
    assert config["lr"] == 0.1
    losses = [(row["step"], row.get("train/loss"), row.get("eval/loss")) for row in rows]
    assert [one for one in losses if one[1:] != (None, None)] == [(5, 2.0, None), (7, None, 1.5), (10, 1.0, None)]
    (table,) = directory.glob("offline-run-*/files/media/table/*.table.json")
    content = json.loads(table.read_text())
    assert (content["columns"], content["data"]) == (["step", "prompt", "response"], [[10, "1+1=", "2"]])


def test_what_wandb_leaves_to_be_published_says_nothing_of_this_machine(wandb_run, tmp_path):
    directory, records = wandb_run
    (run,) = [record.run for record in records if record.HasField("run")]
    assert run.host == "rlhf-flows" != socket.gethostname()
    assert not [record for record in records if record.HasField("output") or record.HasField("output_raw")]
    left = [path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert [path for path in left if path.is_symlink() or "logs" in path.parts] == []
    assert left
    for path in left:
        content = path.read_bytes()
        assert str(tmp_path).encode() not in content, path
        assert str(Path(__file__).parents[3]).encode() not in content, path
        assert b"printed by the driver" not in content, path
