"""Data sets of the Hugging Face hub, from a hub on the loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub

COMMIT, OLD_COMMIT = "c0ffee" + "0" * 34, "decade" + "0" * 34
REVISIONS = {"main": COMMIT, "v1": OLD_COMMIT}
CARD = """---
configs:
- config_name: sums
  default: true
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
- config_name: words
  data_files: [{split: train, path: words.jsonl}]
- config_name: poems
  data_files: [{split: poems, path: words.jsonl}]
- config_name: halves
  data_files: [{split: first, path: words.jsonl}, {split: second, path: words.jsonl}]
---
"""
REPOSITORIES = {
    "org/name": {
        "README.md": CARD,
        "train.jsonl": '{"prompt": "1+2?", "response": "3"}\n',
        "test.jsonl": '{"prompt": "5?", "response": "5"}\n',
        "words.jsonl": '{"text": "one"}\n',
    },
    f"org/name@{OLD_COMMIT}": {"train.jsonl": '{"text": "old"}\n'},
    "org/scripted": {"scripted.py": "raise SystemExit('the script was run')\n"},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    files = {name: {path: text.encode() for path, text in texts.items()} for name, texts in REPOSITORIES.items()}
    with Hub(files, REVISIONS).served() as address:
        yield address


READ = """
import json, sys
from rlhf_core.data.errors import DataError
from rlhf_core.data.sources import hub_commit, read_hub
results = []
for arguments in json.loads(sys.argv[1]):
    try:
        results.append(read_hub(*arguments))
    except DataError as error:
        results.append(str(error))
print(json.dumps([hub_commit("org/name", sys.argv[2] or None), *results]))
"""


def read(home: Path, endpoint: str, requests: list[list[str | None]], revision: str = "", offline: str = "0") -> list:
    """[commit, then the rows or the error of each request], from a process of its own: the endpoint is read once."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", READ, json.dumps(requests), revision]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_splits_and_subsets_of_a_hub_data_set_and_what_it_does_not_have(hub: str, tmp_path: Path) -> None:
    train, test = [{"prompt": "1+2?", "response": "3"}], [{"prompt": "5?", "response": "5"}]
    commit, *results = read(
        tmp_path,
        hub,
        [
            ["org/name", None, None, None],
            ["org/name", "main", None, "test"],
            ["org/name", COMMIT, "words", None],
            ["org/name", "v1", None, None],
            ["org/name", None, "poems", None],
            ["org/name", None, "sums", "test[:1]"],
            ["org/name", None, "halves", None],
            ["org/name", None, None, "dev"],
            ["org/name", None, "numbers", None],
            ["org/absent", None, None, None],
            ["org/scripted", None, None, None],
        ],
    )
    assert commit == COMMIT
    assert results[:5] == [train, test, [{"text": "one"}], [{"text": "old"}], [{"text": "one"}]]
    assert results[5] == test
    assert results[6] == "hub data set org/name has several splits; set `split` to one of first, second"
    for message, said in zip(results[7:], ("dev", "numbers", "404", "scripts are no longer supported"), strict=True):
        assert message.startswith("hub data set org/")
        assert said in message
        assert "\n" not in message
    # What was read once is there without the hub, where its commit is given.
    offline = read(tmp_path, hub, [["org/name", COMMIT, "sums", None]], COMMIT, offline="1")
    assert offline == [COMMIT, train]


HELD_OUT = """
import json, sys
from rlhf_core.config.data import DataSource
from rlhf_core.data.loading import load_data
from stages.inputs import data_fingerprints
source = DataSource(**json.loads(sys.argv[1]))
data = load_data("sft", source)
reports = [[reading.name, reading.shape] for one in data.sources for reading in (one.train, one.held_out)]
print(json.dumps([data.rows, data.held_out, reports, data_fingerprints("sft", source)]))
"""


def test_held_out_rows_of_another_data_set_of_the_hub(hub: str, tmp_path: Path) -> None:
    """Their commit is what the key has of them."""
    source = {"hub": "org/name", "split": "test", "revision": COMMIT}
    source |= {"eval_hub": "org/name", "eval_subset": "words", "eval_split": "train"}
    variables = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    for revision, text, commit in (("main", "one", COMMIT), ("v1", "old", OLD_COMMIT)):
        subset = "words" if revision == "main" else "default"
        asked = {**source, "eval_revision": revision, "eval_subset": subset}
        command = [sys.executable, "-c", HELD_OUT, json.dumps(asked)]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        rows, held_out, readings, prints = json.loads(done.stdout.splitlines()[-1])
        assert rows == [{"prompt": "5?", "response": "5"}]
        assert held_out == [{"text": text}]
        assert readings[1] == [f"org/name ({subset}) (train)", "text"]
        assert prints == {"hub": COMMIT, "eval_hub": commit}


def test_a_hub_that_cannot_be_reached_is_an_error_of_one_line(tmp_path: Path) -> None:
    """A refused connection is no OSError in the hub's client."""
    (message,) = read(tmp_path, "http://127.0.0.1:9", [["org/name", None, None, None]], COMMIT)[1:]
    assert message.startswith("hub data set org/name cannot be read: ")
    assert "refused" in message
