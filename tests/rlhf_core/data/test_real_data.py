"""The real files as canonical rows, compared with what plain Python finds in them."""

import json

import pytest

from rlhf_core.config.data import DataSource
from rlhf_core.data.loading import load_data
from rlhf_core.data.report import data_report


def read(kind, path, **source):
    data = load_data(kind, DataSource(path=str(path), **source))
    return data, data_report(kind, data)


@pytest.fixture
def chat(test_data):
    return test_data / "chat"


def test_alpaca(chat):
    raw = json.loads((chat / "alpaca_en_demo.json").read_text())
    data, report = read("sft", chat / "alpaca_en_demo.json")
    assert len(data.rows) == len(raw) == 999
    assert [row["response"] for row in data.rows] == [row["output"] for row in raw]
    with_input = [(ours["prompt"], row) for ours, row in zip(data.rows, raw, strict=True) if row["input"]]
    assert len(with_input) == 412
    assert all(prompt == f"{row['instruction']}\n{row['input']}" for prompt, row in with_input)
    assert report["sources"][0]["shape"] == "alpaca"
    assert report["duplicate_rows"] == len(raw) - len({json.dumps(row, sort_keys=True) for row in raw}) == 14


def test_preference_pairs(chat):
    raw = json.loads((chat / "dpo_en_demo.json").read_text())
    data, report = read("pairs", chat / "dpo_en_demo.json", on_bad_row="refuse")
    assert len(data.rows) == len(raw) == 300
    for row, theirs in zip(data.rows, raw, strict=True):
        assert [message["content"] for message in row["prompt"]] == [turn["value"] for turn in theirs["conversations"]]
        for side in ("chosen", "rejected"):
            assert row[side] == [{"role": "assistant", "content": theirs[side]["value"]}]
    assert sum(row["prompt"][0]["role"] == "system" for row in data.rows) == 80
    assert report["sources"][0]["shape"] == "messages (ShareGPT's from/value)"


def test_tool_calls(chat):
    raw = json.loads((chat / "glaive_toolcall_en_demo.json").read_text())
    data, _ = read("sft", chat / "glaive_toolcall_en_demo.json")
    assert len(data.rows) == len(raw) == 300
    turns = [turn for row in raw for turn in row["conversations"]]
    messages = [message for row in data.rows for message in row["messages"]]
    assert len(messages) == len(turns)
    calls = [json.loads(turn["value"]) for turn in turns if turn["from"] == "function_call"]
    ours = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    assert ours == calls
    assert len(calls) == 211
    results = [turn["value"] for turn in turns if turn["from"] == "observation"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == results
    tools = [json.loads(row["tools"]) for row in raw]
    assert [[tool["function"] for tool in row.get("tools", [])] for row in data.rows] == tools


def test_labelled_answers(chat):
    raw = json.loads((chat / "kto_en_demo.json").read_text())
    data, report = read("labelled", chat / "kto_en_demo.json")
    assert len(data.rows) == len(raw) == 300
    for row, theirs in zip(data.rows, raw, strict=True):
        assert row["label"] is theirs["label"]
        said = [message["content"] for message in row["prompt"] + row["response"]]
        assert said == [message["content"] for message in theirs["messages"]]
        assert len(row["response"]) == 1
    assert report["sources"][0]["shape"] == "messages (role/content)"


def test_loss_weights_and_content_in_parts(chat):
    raw = [json.loads(line) for line in (chat / "v1_sft_demo.jsonl").open()]
    data, _ = read("sft", chat / "v1_sft_demo.jsonl")
    assert len(data.rows) == len(raw) == 500
    for row, theirs in zip(data.rows, raw, strict=True):
        for message, their in zip(row["messages"], theirs["messages"], strict=True):
            assert message["content"] == "".join(part["value"] for part in their["content"])
            assert message.get("weight", 0.0) == their["loss_weight"]


@pytest.mark.parametrize(
    ("name", "count"), [("train.jsonl", 7473), ("test.jsonl", 1319), ("test_socratic.jsonl", 1319)]
)
def test_gsm8k(test_data, name, count):
    path = test_data / "gsm8k" / name
    raw = [json.loads(line) for line in path.open()]
    data, report = read("prompts", path, columns={"prompt": "question", "label": "answer"})
    assert data.rows == [{"prompt": row["question"], "label": row["answer"]} for row in raw]
    assert len(raw) == count
    answers, _ = read("sft", path, columns={"prompt": "question", "response": "answer"})
    assert [row["response"] for row in answers.rows] == [row["answer"] for row in raw]
    assert report["rows_read"] == report["rows"] == count
