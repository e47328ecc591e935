import json
import struct

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.tracking.events import EventLog, read_events
from rlhf_core.tracking.history import History


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
    resumed.replace(first.records[:2])
    resumed.add(3, {"loss": 3.0})
    assert resumed.curve("loss") == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert lines(tmp_path) == resumed.records


def test_tensorboard_holds_the_same_curve(tmp_path):
    h = history(tmp_path, tensorboard=True)
    h.add(1, {"loss": 2.0})
    h.add(5, {"loss": 1.0})
    h.close()
    accumulator = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("train/loss")] == [(1, 2.0), (5, 1.0)]


def test_an_offline_wandb_run_holds_the_same_curve_and_the_settings(tmp_path):
    h = history(tmp_path, wandb_project="rlhf-test")
    h.add(1, {"loss": 2.0})
    h.add(5, {"loss": 1.0})
    h.close()
    (file,) = (tmp_path / "a" / "wandb").glob("offline-run-*/run-*.wandb")
    rows, config, project = [], {}, None
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        if record.HasField("run"):
            project = record.run.project
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert project == "rlhf-test"
    assert config["lr"] == 0.1
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 2.0), (5, 1.0)]
