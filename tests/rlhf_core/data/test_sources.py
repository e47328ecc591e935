import json
import math
import subprocess
import sys

import datasets
import fsspec
import pyarrow
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rlhf_core.data.errors import DataError
from rlhf_core.data.sources import hub_commit, read_hub, read_path

ROWS = [{"question": "3+4=", "answer": "7", "extra": "1"}, {"question": "1+\n1=", "answer": "2", "extra": None}]
TABLE = pyarrow.Table.from_pylist(ROWS)


def as_bytes(suffix):
    sink = pyarrow.BufferOutputStream()
    if suffix == ".json":
        return json.dumps(ROWS).encode()
    if suffix == ".jsonl":
        return ("\n".join(map(json.dumps, ROWS)) + "\n\n").encode()
    if suffix == ".csv":
        pyarrow.csv.write_csv(TABLE, sink)
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(TABLE, sink)
    else:
        new = pyarrow.ipc.new_stream if suffix == ".stream.arrow" else pyarrow.ipc.new_file
        with new(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def filled(rows):
    """Without what is missing, which CSV writes as an empty cell and Arrow as a null."""
    return [{name: value for name, value in row.items() if value not in (None, "")} for row in rows]


SUFFIXES = [".json", ".jsonl", ".csv", ".parquet", ".arrow", ".stream.arrow"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(as_bytes(suffix))
    assert filled(read_path(str(path), None)) == filled(ROWS)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".stream.arrow"])
def test_files_on_s3(s3_url, suffix):
    with fsspec.open(f"{s3_url}/rows{suffix}", "wb") as file:
        file.write(as_bytes(suffix))
    assert filled(read_path(f"{s3_url}/rows{suffix}", None)) == filled(ROWS)
    with pytest.raises(DataError, match="does not exist; give the path or s3:// URL of a data file"):
        read_path(f"{s3_url}/absent{suffix}", None)


def test_a_saved_folder_a_loader_and_a_missing_folder_on_s3(s3_url):
    datasets.Dataset.from_list(ROWS).save_to_disk(f"{s3_url}/saved")
    assert filled(read_path(f"{s3_url}/saved", None)) == filled(ROWS)
    with fsspec.open(f"{s3_url}/loader.py", "w") as file:
        file.write(f"def load_rows(split):\n    return {ROWS!r}\n")
    assert read_path(f"{s3_url}/loader.py", None) == ROWS
    with pytest.raises(DataError, match="does not exist"):
        read_path(f"{s3_url}/none", None)


def test_a_folder_saved_by_datasets_with_and_without_splits(tmp_path):
    plain = datasets.Dataset.from_list([{"n": 1}, {"n": 2}, {"n": 3}])
    plain.select([2, 0]).save_to_disk(tmp_path / "plain")
    assert read_path(str(tmp_path / "plain"), None) == [{"n": 3}, {"n": 1}]
    datasets.DatasetDict(train=plain, test=plain.select([1])).save_to_disk(tmp_path / "dict")
    assert read_path(str(tmp_path / "dict"), None) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert read_path(str(tmp_path / "dict"), "test") == [{"n": 2}]
    with pytest.raises(DataError, match="has no split dev; set `split` to one of test, train"):
        read_path(str(tmp_path / "dict"), "dev")
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="give a folder that `datasets` saved with save_to_disk"):
        read_path(str(tmp_path / "other"), None)


def test_splits_of_a_json_object(tmp_path):
    path = tmp_path / "rows.json"

    def read(content, split):
        path.write_text(json.dumps(content))
        return read_path(str(path), split)

    both = {"train": [{"n": 1}], "test": [{"n": 2}]}
    assert read(both, None) == [{"n": 1}]
    assert read(both, "test") == [{"n": 2}]
    assert read({"only": [{"n": 3}]}, None) == [{"n": 3}]
    with pytest.raises(DataError, match="has several splits; set `split` to one of a, b"):
        read({"a": [{"n": 1}], "b": [{"n": 1}]}, None)
    with pytest.raises(DataError, match="has no splits, and test is asked for; leave the split out"):
        read([{"n": 1}], "test")
    with pytest.raises(DataError, match="has no rows in split test"):
        read({"train": [{"n": 1}], "test": []}, "test")


def test_fields_that_arrow_lends_from_other_rows_are_taken_away(tmp_path):
    rows = [{"call": {"name": "a", "arguments": {"x": 1}}}, {"call": {"name": "b", "arguments": {"y": [None, 2]}}}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert pyarrow.parquet.read_table(path).to_pylist() != rows
    assert read_path(str(path), None) == rows


def test_a_loader_is_given_the_split_and_may_yield(tmp_path):
    path = tmp_path / "loader.py"
    path.write_text(
        "import json\n\ndef load_rows(split):\n    for n in range(2):\n        yield {'t': f'{split}{n}'}\n"
    )
    assert read_path(str(path), None) == [{"t": "train0"}, {"t": "train1"}]
    assert read_path(str(path), "test") == [{"t": "test0"}, {"t": "test1"}]


DATACLASS_LOADER = """
from __future__ import annotations
from dataclasses import asdict, dataclass

@dataclass
class Solution:
    prompt: str
    response: str

def load_rows(split):
    yield asdict(Solution("1+2?", "3"))
"""


def test_a_loader_may_define_dataclasses_whose_types_are_text(tmp_path):
    path = tmp_path / "loader.py"
    path.write_text(DATACLASS_LOADER)
    assert read_path(str(path), None) == [{"prompt": "1+2?", "response": "3"}]
    assert "rlhf_data_loader" not in sys.modules


ARRAYS_LOADER = """
import numpy as np
import pandas as pd

def load_rows(split):
    yield {"steps": np.array(["a", "b"]), "labels": np.array([True, False]), "margin": np.float32(0.5)}
    yield {"messages": np.array([{"role": "user", "weight": np.int64(0)}], dtype=object), "pair": (1, np.bool_(True))}
    yield from pd.DataFrame({"prompt": ["p"], "label": [3]}).to_dict("records")
"""


def test_a_loader_may_give_the_values_of_numpy_and_pandas(tmp_path):
    path = tmp_path / "loader.py"
    path.write_text(ARRAYS_LOADER)
    rows = read_path(str(path), None)
    assert rows == [
        {"steps": ["a", "b"], "labels": [True, False], "margin": 0.5},
        {"messages": [{"role": "user", "weight": 0}], "pair": [1, True]},
        {"prompt": "p", "label": 3},
    ]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no load_rows; give it `def load_rows"),
        ("def load_rows(split):\n    return 1 / 0", r"failed: ZeroDivisionError: division by zero \(line 2\)"),
        ("def load_rows(split):\n    yield {}\n    raise KeyError('a')", r"failed: KeyError: 'a' \(line 3\)"),
        ("def load_rows(split)\n    pass", r"failed: SyntaxError: .* \(line 1\)"),
        ("def load_rows(split):\n    return {'train': []}", "load_rows gave a dict; it must give or yield dicts"),
        ("def load_rows(split):\n    pass", "load_rows gave a NoneType"),
        ("def load_rows(split):\n    return []", "has no rows"),
        (
            "def load_rows(split):\n    return [{0: 'a', 'b': 'c'}]",
            "holds rows that are not objects with named columns",
        ),
        ("def load_rows(split):\n    return [1]", "holds rows that are not objects with named columns"),
    ],
)
def test_what_a_loader_does_wrong_is_one_line_with_its_place(tmp_path, source, message):
    path = tmp_path / "loader.py"
    path.write_text(source)
    with pytest.raises(DataError, match=message) as caught:
        read_path(str(path), None)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist; give the path or s3:// URL of a data file"),
        ("none", None, "does not exist; give the path or s3:// URL of a data file"),
        ("rows.jsonl", "", "has no rows; give a file with at least one"),
        ("rows.jsonl", '{}\n\n{"a": x}', "is not JSONL: Expecting value at line 3, column 7"),
        ("rows.jsonl", b"\xff\xfe", "is not JSONL: "),
        ("rows.json", "{}", "is not JSON: it holds neither a list of objects nor an object with a list for each split"),
        ("rows.json", "[1]", "holds rows that are not objects with named columns"),
        ("rows.csv", "prompt,label\na,b,c\n", "is not CSV: line 2 has more cells than the header has names"),
        ("rows.parquet", "PAR", "is not PARQUET: "),
        ("rows.parquet", b"PAR1" + bytes(range(40)) + b"\x20\x00\x00\x00PAR1", "is not PARQUET: "),
        ("rows.arrow", "ARROW1xx", "is not ARROW: "),
        (
            "rows.txt",
            "a",
            "has the suffix '.txt'; allowed: .arrow, .csv, .json, .jsonl, .parquet, .py, and a folder that",
        ),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        read_path(str(path), None)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_the_mark_that_windows_puts_before_utf_8_is_no_part_of_the_text(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(b"\xef\xbb\xbf" + as_bytes(suffix))
    assert filled(read_path(str(path), None)) == filled(ROWS)


def test_a_csv_cell_may_be_longer_than_what_python_allows_at_first(tmp_path):
    text = "word " * 40_000
    (tmp_path / "rows.csv").write_text(f"text,id\n{text},1\n")
    assert read_path(str(tmp_path / "rows.csv"), None) == [{"text": text, "id": "1"}]


def test_nan_in_csv_is_missing_and_in_json_stays_what_it_is(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,NaN\n")
    assert read_path(str(tmp_path / "rows.csv"), None) == [{"a": "1", "b": None}]
    (tmp_path / "rows.jsonl").write_text('{"a": NaN}')
    assert math.isnan(read_path(str(tmp_path / "rows.jsonl"), None)[0]["a"])


def test_a_hub_name_without_the_hub_is_one_line():
    assert hub_commit("org/name", "0123456789abcdef" * 2 + "01234567") == "0123456789abcdef" * 2 + "01234567"
    for revision in (None, "a" * 40):
        with pytest.raises(DataError, match=r"hub data set org/name cannot be read: .*") as caught:
            read_hub("org/name", revision, None, None)
        assert "\n" not in str(caught.value)


def test_reading_starts_no_process(tmp_path):
    """`datasets` forks where num_proc is given, and a fork of a process with threads may hang (a saved folder here)."""
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    code = (
        "import os, sys\n"
        "os.fork = os.posix_spawn = os.execv = lambda *_: sys.exit('forked')\n"
        "from rlhf_core.data.sources import read_path\n"
        f"assert len(read_path({str(tmp_path / 'saved')!r}, None)) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
