import json

from rlhf_core.config.data import DataSource
from rlhf_core.data.loading import load_data
from rlhf_core.data.report import counts_of, data_report, row_lengths, summary_markdown

TRAIN = [
    {"prompt": "1+2?", "response": "3", "id": 0},
    {"prompt": "", "response": "3", "id": 1},
    {"prompt": "1+2?", "response": "3", "id": 2},
    {"prompt": "2+2?", "response": "four | `4`", "id": 3},
]
HELD_OUT = [{"prompt": "1+2?", "response": "3"}, {"prompt": "1+2?", "response": 3}, {"prompt": "5?", "response": "5"}]


def report_of(tmp_path):
    for name, rows in (("a.jsonl", TRAIN), ("b.jsonl", HELD_OUT)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSource(path=f"{tmp_path}/a.jsonl", eval_path=f"{tmp_path}/b.jsonl", on_bad_row="drop")
    return data_report("sft", load_data("sft", source))


def test_every_row_is_accounted_for(tmp_path):
    report = report_of(tmp_path)
    assert counts_of(report) == {
        "rows": 3,
        "eval_rows": 2,
        "rows_dropped": 1,
        "eval_rows_dropped": 1,
        "duplicate_rows": 1,
        "eval_rows_in_training": 1,
    }
    (source,) = report["sources"]
    assert source["name"] == f"{tmp_path}/a.jsonl"
    assert (source["shape"], source["rows_read"], source["rows_kept"], source["rows_taken"]) == ("prompt", 4, 3, 3)
    reason = "nothing in column prompt"
    assert source["dropped"] == {reason: {"items": 1, "first_row": 2, "first": reason}}
    assert source["unused_columns"] == ["id"]
    assert source["eval"]["dropped"] == {
        "column response is not text": {
            "items": 1,
            "first_row": 2,
            "first": "column response is not text: it holds int 3; give a string",
        }
    }
    assert report["example"] == {"prompt": "1+2?", "response": "3"}
    lengths = report["characters"]
    assert (lengths["min"], lengths["median"], lengths["max"]) == (5, 5, 14)
    assert (sum(lengths["counts"]), lengths["edges"][0], lengths["edges"][-1]) == (3, 0, 15)
    assert lengths["counts"][lengths["edges"].index(5)] == 2
    json.dumps(report, allow_nan=False)


def test_the_summary_is_markdown_with_a_line_for_each_source(tmp_path):
    lines = summary_markdown(report_of(tmp_path)).splitlines()
    assert lines[0].startswith("**sft**: 3 rows, 2 held out; 1 duplicates; 5 / 5 / 14 characters")
    assert f"| {tmp_path}/a.jsonl | prompt | 4 | nothing in column prompt: 1 (first: row 2) | 3 |" in lines
    assert f"| {tmp_path}/b.jsonl | prompt | 3 | column response is not text: 1 (first: row 2) | held out |" in lines
    assert "1 held-out rows are training rows as well." in lines
    assert lines[-2:] == ["| prompt | `1+2?` |", "| response | `3` |"]


def test_what_was_not_read_is_in_the_report_and_its_summary(tmp_path):
    assert f"Not read in {tmp_path}/a.jsonl: columns `id`." in summary_markdown(report_of(tmp_path)).splitlines()
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no", "refusal": "no"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said, "id": 1, "source": "x"}))
    report = data_report("sft", load_data("sft", DataSource(path=f"{tmp_path}/c.jsonl")))
    assert report["sources"][0]["unused_message_keys"] == ["refusal"]
    line = f"Not read in {tmp_path}/c.jsonl: columns `id`, `source`; keys of messages `refusal`."
    assert line in summary_markdown(report).splitlines()


def test_what_would_break_a_table_is_replaced(tmp_path):
    report = report_of(tmp_path) | {"example": {"messages": [{"content": "a|b`c\nd"}], "text": "x" * 400}}
    assert summary_markdown(report).splitlines()[-2:] == [
        """| messages | `[{"content": "a\\|b'c\\nd"}]` |""",
        f"| text | `{'x' * 300}...` |",
    ]


def test_lengths_count_all_text_of_a_row():
    rows = [
        {"text": "four"},
        {"prompt": "ab", "steps": ["c", "de"], "labels": [True, False]},
        {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d", "weight": 0.5}]},
    ]
    assert row_lengths(rows) == [4, 5, 4]
