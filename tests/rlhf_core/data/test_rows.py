import json
import math

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_core.config.data import ArithmeticSource, DataSource
from rlhf_core.data.rows import DataError, drop_equal_pairs, load_rows, read_jsonl, write_jsonl

ROWS = [{"question": "3+4=", "answer": "7", "extra": 1}, {"question": "1+1=", "answer": "2", "extra": None}]


def write(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    elif suffix == ".csv":
        path.write_text("question,answer,extra\n3+4=,7,1\n1+1=,2,\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows_under_our_names(tmp_path, suffix):
    source = DataSource(path=write(tmp_path, suffix), columns={"prompt": "question", "label": "answer"})
    assert load_rows("prompts", source) == ([{"prompt": "3+4=", "label": "7"}, {"prompt": "1+1=", "label": "2"}], [])


def test_max_rows_and_held_out_rows(tmp_path):
    path = write(tmp_path, ".jsonl")
    source = DataSource(path=path, eval_path=path, columns={"prompt": "question", "label": "answer"}, max_rows=1)
    rows, held_out = load_rows("prompts", source)
    assert (len(rows), len(held_out)) == (1, 2)


def test_real_preference_pairs_and_gsm8k(test_data, tmp_path):
    columns = {"prompt": "question", "label": "answer"}
    rows, _ = load_rows("prompts", DataSource(path=str(test_data / "gsm8k" / "test.jsonl"), columns=columns))
    assert len(rows) == 1319
    assert set(rows[0]) == {"prompt", "label"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist; give the path or s3:// URL of a data file"),
        ("rows.jsonl", "", "has no rows; give a file with at least one"),
        (
            "rows.jsonl",
            '{"question": "a", "label": "b"}\n',
            "has no column prompt; it has label, question; map them with data.prompts.columns, e.g. {prompt: label}",
        ),
        ("rows.jsonl", '{"prompt": "a", "label": null}', "row 1 of .* has nothing in column label; fill it"),
        ("rows.jsonl", '{"prompt": "a", "label": "b"}\n{"prompt": "a"}', "row 2 of .* has nothing in column label"),
        ("rows.jsonl", '{"prompt": "a", "label": NaN}', "row 1 of .* has nothing in column label; fill it"),
        ("rows.csv", "prompt,label\na,b\na,NaN\n", "row 2 of .* has nothing in column label; fill it"),
        ("rows.csv", "prompt,label\na,b,c\n", "is not CSV: line 2 has more cells than the header has names"),
        ("rows.jsonl", "{", "is not JSONL: "),
        ("rows.json", "{}", "is not JSON: it holds no list of objects"),
        ("rows.json", "[1]", "holds rows that are not objects with named columns"),
        ("rows.txt", "a", "has the suffix '.txt'; allowed: .csv, .json, .jsonl, .parquet"),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows("prompts", DataSource(path=str(path)))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("sft", {"response": 7}, "row 2 of .*, column response holds int 7; give a string"),
        (
            "sft",
            {"prompt": [{"role": "user", "content": "3+4="}]},
            "column prompt holds a list of messages; conversations are not read yet: give a string, one turn",
        ),
        ("pairs", {"rejected": ["x"]}, r"column rejected holds list \['x'\]; give a string"),
        ("prompts", {"label": True}, "column label holds bool True; give a string"),
        ("steps", {"steps": "one"}, "column steps holds str 'one'; give a list of strings"),
        ("steps", {"steps": ["a", 1]}, "give a list of strings"),
        ("steps", {"labels": ["+", "-"]}, "column labels holds .*; give a list of booleans or numbers"),
        ("steps", {"labels": [1, None]}, "give a list of booleans or numbers"),
        ("steps", {"labels": [1, math.nan]}, "give a list of booleans or numbers"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_values_of_another_type_are_refused_with_their_row(tmp_path, kind, changed, message, suffix):
    right = {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d", "label": "e"}
    right |= {"steps": ["f", "g"], "labels": [True, 0.5]}
    rows = [right, {**right, **changed}]
    path = tmp_path / f"rows{suffix}"
    path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=message) as caught:
        load_rows(kind, DataSource(path=str(path)))
    assert f"data set {kind}: row 2 of {path}" in str(caught.value)
    path.write_text(json.dumps(rows[:1]) if suffix == ".json" else json.dumps(right))
    (row,), _ = load_rows(kind, DataSource(path=str(path)))
    assert row == {name: right[name] for name in row}


def test_numbers_are_labels_and_the_nan_of_pandas_is_none(tmp_path):
    path = tmp_path / "rows.parquet"

    def labels(values):
        columns = {"prompt": ["a"] * len(values), "label": values}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return [row["label"] for row in load_rows("prompts", DataSource(path=str(path)))[0]]

    assert labels([7, -12]) == ["7", "-12"]
    assert labels([7.0, 0.25]) == ["7", "0.25"]  # how pandas holds whole numbers beside a missing one
    with pytest.raises(DataError, match=r"row 2 of .* has nothing in column label"):
        labels([7.0, math.nan])


def test_pairs_of_equal_responses_are_dropped_and_counted():
    rows = [{"prompt": "p", "chosen": a, "rejected": b} for a, b in ("xy", "zz", "yx", "xx")]
    assert drop_equal_pairs(rows) == ([rows[0], rows[2]], 2)
    assert drop_equal_pairs([]) == ([], 0)
    with pytest.raises(DataError, match="chosen and rejected are equal in all 2 rows; give pairs that differ"):
        drop_equal_pairs([rows[1], rows[3]])


def test_generated_sets_hold_out_what_they_hold_out():
    spec = ArithmeticSource(rows=300, eval_rows=50)
    train, held_out = load_rows("pairs", DataSource(arithmetic=spec))
    evaluation, _ = load_rows("eval", DataSource(arithmetic=ArithmeticSource(rows=60)))
    assert (len(train), len(held_out), len(evaluation)) == (300, 50, 60)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in [*held_out, *evaluation]}


def test_more_prompts_than_problems_is_one_line():
    with pytest.raises(DataError, match="data set prompts: rows is 99999, but the train split has"):
        load_rows("prompts", DataSource(arithmetic=ArithmeticSource(rows=99999)))


def test_jsonl_round_trip(tmp_path):
    rows = [{"a": "ü\u2028x"}, {"a": 1}]
    write_jsonl(tmp_path / "d" / "r.jsonl", rows)
    assert read_jsonl(tmp_path / "d" / "r.jsonl") == rows
