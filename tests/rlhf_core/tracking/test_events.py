import json
import subprocess
import sys

import numpy as np
import pytest

from rlhf_core.tracking.events import EventLog, first_error, read_events

WRITE_MANY = """
import sys
from rlhf_core.tracking.events import EventLog
for number in range(200):
    EventLog(sys.argv[1]).write("sample", worker=int(sys.argv[2]), number=number, text="x" * 300)
"""


def test_events_of_several_processes_stay_whole_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_MANY, str(path), str(worker)]) for worker in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    events = list(read_events(path))
    assert sorted((e["worker"], e["number"]) for e in events) == [(w, n) for w in range(3) for n in range(200)]


def test_a_half_written_line_is_left_for_later(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path).phase("one")
    with path.open("a") as file:
        file.write('{"type": "pha')
    assert [event["name"] for event in read_events(path)] == ["one"]
    assert list(read_events(tmp_path / "none.jsonl")) == []


def test_the_first_error_is_the_cause(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    try:
        raise KeyError("lost")
    except KeyError as error:
        log.error(error, "trainer", 1)
    log.error(RuntimeError("gloo:\n connection reset"), "trainer", 0)
    cause = first_error(log.path)
    assert cause is not None
    assert (cause["role"], cause["rank"], cause["kind"], cause["message"]) == ("trainer", 1, "KeyError", "'lost'")
    assert "test_events.py" in cause["traceback"]
    assert "\n" not in list(read_events(log.path))[1]["message"]


def test_numpy_scalars_are_numbers_and_unknown_types_are_refused(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.metrics(3, {"loss": np.float32(0.5)})
    assert json.loads(log.path.read_text())["values"] == {"loss": 0.5}
    with pytest.raises(ValueError, match="event type 'metric' is not one of phase"):
        log.write("metric")
