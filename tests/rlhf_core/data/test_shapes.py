import math

import pytest

from rlhf_core.data.errors import BadRow, DataError
from rlhf_core.data.shapes import check_mapped, convert, recognise, renamed

U, A, S, T = (
    {"role": role, "content": text}
    for role, text in (("user", "1+2?"), ("assistant", "3"), ("system", "be brief"), ("tool", "3"))
)
WRONG = {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "3"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(kind, row, columns=None, shape=None):
    row = renamed(row, columns or {})
    found = recognise([row], kind, columns or {}, shape)
    return found.described, convert(row, kind, found.shape, "ки")


@pytest.mark.parametrize(
    ("row", "shape", "canonical"),
    [
        ({"prompt": "1+2?", "response": "3", "id": 7}, "prompt", {"prompt": "1+2?", "response": "3"}),
        ({"prompt": "1+2?", "response": "3", "system": "be brief"}, "prompt", {"messages": [S, U, A]}),
        ({"prompt": "1+2?", "response": "3", "tools": TOOLS}, "prompt", {"messages": [U, A], "tools": TOOLS}),
        # The prompt is not trained on, be it the assistant's.
        (
            {"prompt": [U, A, U], "response": "3"},
            "prompt (role/content)",
            {"messages": [U, {**A, "weight": 0.0}, U, A]},
        ),
        ({"prompt": "1+2?", "response": [CALL, T, A]}, "prompt", {"messages": [U, CALL, T, A]}),
        ({"instruction": "1+2?", "input": "", "output": "3"}, "alpaca", {"prompt": "1+2?", "response": "3"}),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, "alpaca", {"prompt": "Add\n1, 2", "response": "3"}),
        (
            {"instruction": "1+2?", "output": "3", "system": "be brief", "history": [["1+2?", "3"]]},
            "alpaca",
            {"messages": [S, U, A, U, A]},
        ),
        ({"messages": [U, A]}, "messages (role/content)", {"messages": [U, A]}),
        ({"conversations": [HUMAN, GPT]}, "messages (ShareGPT's from/value)", {"messages": [U, A]}),
        ({"conversations": [U, A]}, "messages (role/content)", {"messages": [U, A]}),
        (
            {"conversations": [HUMAN, GPT], "system": "be brief"},
            "messages (ShareGPT's from/value)",
            {"messages": [S, U, A]},
        ),
        (
            {"messages": [U, A], "tools": '[{"name": "add"}]'},
            "messages (role/content)",
            {"messages": [U, A], "tools": TOOLS},
        ),
        ({"text": "It was night.", "meta": {}}, "text", {"text": "It was night."}),
    ],
)  # fmt: skip
def test_sft(row, shape, canonical):
    assert read("sft", row) == (shape, canonical)


@pytest.mark.parametrize(
    ("row", "shape", "canonical"),
    [
        (
            {"prompt": "1+2?", "chosen": "3", "rejected": "4", "margin": 2},
            "prompt",
            {"prompt": "1+2?", "chosen": "3", "rejected": "4", "margin": 2.0},
        ),
        (
            {"prompt": "1+2?", "chosen": "3", "rejected": "4", "margin": math.nan},
            "prompt",
            {"prompt": "1+2?", "chosen": "3", "rejected": "4"},
        ),
        # Sides that repeat the prompt: it counts once.
        (
            {"prompt": "1+2?", "chosen": [U, A], "rejected": [U, WRONG]},
            "prompt (role/content)",
            {"prompt": [U], "chosen": [A], "rejected": [WRONG]},
        ),
        (
            {"prompt": [S, U], "chosen": [A], "rejected": [WRONG]},
            "prompt (role/content)",
            {"prompt": [S, U], "chosen": [A], "rejected": [WRONG]},
        ),
        (
            {"instruction": "1+2?", "chosen": "3", "rejected": "4"},
            "alpaca",
            {"prompt": "1+2?", "chosen": "3", "rejected": "4"},
        ),
        (
            {"chosen": [S, U, A], "rejected": [S, U, WRONG]},
            "conversation_pairs (role/content)",
            {"prompt": [S, U], "chosen": [A], "rejected": [WRONG]},
        ),
        # The common start may hold earlier answers and a tool's result, and never the answer itself.
        (
            {"chosen": [U, CALL, T, A], "rejected": [U, CALL, T, WRONG]},
            "conversation_pairs (role/content)",
            {"prompt": [U, CALL, T], "chosen": [A], "rejected": [WRONG]},
        ),
        (
            {"chosen": [U, A], "rejected": [U, A, T, WRONG]},
            "conversation_pairs (role/content)",
            {"prompt": [U], "chosen": [A], "rejected": [A, T, WRONG]},
        ),
        (
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "4"}, "tools": "[]"},
            "messages (ShareGPT's from/value)",
            {"prompt": [U], "chosen": [A], "rejected": [WRONG]},
        ),
        (
            {"messages": [U, A, U], "chosen": "3", "rejected": "4"},
            "messages (role/content)",
            {"prompt": [U, A, U], "chosen": [A], "rejected": [WRONG]},
        ),
    ],
)
def test_pairs(row, shape, canonical):
    assert read("pairs", row) == (shape, canonical)


@pytest.mark.parametrize(
    ("label", "truth"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False), ("0", False)],
)
def test_labelled(label, truth):
    row = {"prompt": "1+2?", "response": "3", "label": label}
    assert read("labelled", row) == ("prompt", {"prompt": "1+2?", "response": "3", "label": truth})
    row = {"instruction": "1+2?", "output": "3", "label": label}
    assert read("labelled", row) == ("alpaca", {"prompt": "1+2?", "response": "3", "label": truth})
    row = {"messages": [S, U, A, U, A], "label": label}
    canonical = {"prompt": [S, U, A, U], "response": [A], "label": truth}
    assert read("labelled", row) == ("messages (role/content)", canonical)


@pytest.mark.parametrize(
    ("row", "shape", "canonical"),
    [
        (
            {"prompt": "1+2+3?", "steps": ["1+2=3", "3+3=7"], "labels": [1, 0]},
            "prompt",
            {"prompt": "1+2+3?", "steps": ["1+2=3", "3+3=7"], "labels": [True, False]},
        ),
        (
            {"prompt": "p", "steps": ["a", "b"], "labels": [1, 0.25]},
            "prompt",
            {"prompt": "p", "steps": ["a", "b"], "labels": [1.0, 0.25]},
        ),
        (
            {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
            "completions",
            {"prompt": "p", "steps": ["a", "b"], "labels": [True, False]},
        ),
        (
            {"input": "1+2+3? Step 1: 1+2=3 ки\nStep 2: 3+3=7 ки", "label": "1+2+3? Step 1: 1+2=3 +\nStep 2: 3+3=7 -"},
            "markers",
            {"prompt": "1+2+3?", "steps": ["Step 1: 1+2=3", "Step 2: 3+3=7"], "labels": [True, False]},
        ),
    ],
)
def test_steps(row, shape, canonical):
    described, converted = read("steps", row)
    assert (described, converted) == (shape, canonical)
    assert [type(one) for one in converted["labels"]] == [type(one) for one in canonical["labels"]]


@pytest.mark.parametrize("kind", ["prompts", "eval"])
@pytest.mark.parametrize(
    ("row", "canonical"),
    [
        ({"prompt": "1+2?", "label": "3"}, {"prompt": "1+2?", "label": "3"}),
        ({"prompt": "1+2?", "label": 3}, {"prompt": "1+2?", "label": "3"}),
        ({"prompt": "1+2?", "label": 3.0}, {"prompt": "1+2?", "label": "3"}),
        ({"prompt": "1+2?", "label": 0.25}, {"prompt": "1+2?", "label": "0.25"}),
        ({"prompt": [S, U], "label": "3"}, {"prompt": [S, U], "label": "3"}),
        ({"instruction": "Add", "input": "1, 2", "label": "3"}, {"prompt": "Add\n1, 2", "label": "3"}),
        ({"messages": [U, A, U], "label": "3"}, {"prompt": [U, A, U], "label": "3"}),
        ({"prompt": "1+2?", "label": "3", "tools": TOOLS}, {"prompt": [U], "label": "3", "tools": TOOLS}),
    ],
)
def test_prompts(kind, row, canonical):
    assert read(kind, row)[1] == canonical


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("sft", {"prompt": "a", "response": 7}, "column response is not text: it holds int 7; give a string"),
        ("sft", {"messages": [U]}, "a conversation without an assistant's message"),
        ("sft", {"messages": "hi"}, "column messages is no conversation: it holds str 'hi'"),
        ("sft", {"text": ["a"]}, "column text is not text: it holds list ['a']; give a string"),
        ("sft", {"prompt": "a", "response": [U]}, "response is no response of the assistant's: it has the messages us"),
        ("sft", {"prompt": [U, A], "response": "3"}, "a prompt does not end with the user's message or a tool's"),
        ("sft", {"instruction": "a", "output": "b", "history": ["x"]}, "column history is no list of (instruction, an"),
        ("sft", {"messages": [S, U, A], "system": "be long"}, "a system prompt in column system and another in the co"),
        ("sft", {"prompt": "a", "response": "b", "images": ["x.png"]}, "vision-language models are not supported"),
        ("pairs", {"prompt": "p", "chosen": ["x"], "rejected": "y"}, "column chosen is not text: it holds list ['x']"),
        ("pairs", {"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, "column margin is not a number: s"),
        ("pairs", {"prompt": "p", "chosen": [U, A], "rejected": "b"}, "chosen starts with a message that is not the a"),
        ("pairs", {"chosen": "a", "rejected": "b"}, "a pair of texts has no prompt: column chosen holds str 'a'"),
        ("pairs", {"chosen": [U, A], "rejected": [S, U, A]}, "chosen and rejected have no common start that could be"),
        ("pairs", {"chosen": [S, U], "rejected": [S, U]}, "chosen is no response of the assistant's: it has the messa"),
        ("pairs", {"chosen": [U, A, U, A], "rejected": [U, WRONG]}, "chosen is no response of the assistant's"),
        ("labelled", {"messages": [U, A, U], "label": True}, "a prompt does not end with the user's message or a tool"),
        ("labelled", {"messages": [A], "label": True}, "a prompt does not end with the user's message or a tool's"),
        ("labelled", {"prompt": "p", "response": "r", "label": "good"}, "column label is not true or false: str 'good"),
        ("labelled", {"prompt": "p", "response": "r", "label": 0.5}, "column label is not true or false: float 0.5"),
        ("labelled", {"prompt": "p", "response": "r", "label": -1}, "column label is not true or false: int -1"),
        ("prompts", {"prompt": "p", "label": True}, "column label is not text: it holds bool True; give a string"),
        ("prompts", {"messages": [U, A], "label": "3"}, "a prompt does not end with the user's message or a tool's"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(kind, row, reason):
    with pytest.raises(BadRow) as caught:
        read(kind, row)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("value", [None, "", [], math.nan])
def test_a_row_with_nothing_in_a_column(value):
    shape = recognise([{"prompt": "a", "label": "b"}], "prompts").shape
    with pytest.raises(BadRow, match="nothing in column label"):
        convert({"prompt": "a", "label": value}, "prompts", shape, "ки")
    with pytest.raises(BadRow, match="nothing in column label"):
        convert({"prompt": "a"}, "prompts", shape, "ки")


def test_optional_columns_that_only_some_rows_have():
    rows = [
        {"instruction": "Add", "output": "3"},
        {"instruction": "Add", "input": "1, 2", "output": "3", "system": math.nan},
        {"instruction": "Add", "input": None, "output": "3", "system": "be brief"},
    ]
    shape = recognise(rows, "sft").shape
    assert [convert(row, "sft", shape, "ки") for row in rows] == [
        {"prompt": "Add", "response": "3"},
        {"prompt": "Add\n1, 2", "response": "3"},
        {"messages": [S, {"role": "user", "content": "Add"}, A]},
    ]


@pytest.mark.parametrize(
    ("kind", "row", "columns", "shape", "message"),
    [
        (
            "sft",
            {"question": "a", "answer": "b"},
            {},
            None,
            "fits no shape of this data set (prompt: prompt + response; alpaca: instruction + output; "
            "messages: messages; text: text); it has answer, question; map them, e.g. columns: "
            "{prompt: question, response: answer}",
        ),
        ("sft", {}, {}, None, "it has no columns"),
        (
            "sft",
            {"messages": [U, A], "text": "x"},
            {},
            None,
            "fits several shapes (messages: messages; text: text); say which is meant, e.g. shape: messages, or map",
        ),
        (
            "pairs",
            {"prompt": "p", "messages": [U], "chosen": "a", "rejected": "b"},
            {},
            None,
            "fits several shapes (prompt: prompt + chosen + rejected; messages: messages + chosen + rejected)",
        ),
        ("sft", {"messages": [U, A]}, {}, "text", "has no column text, which shape text needs; it has messages; map"),
        ("prompts", {"x": "a", "label": "b"}, {"prompt": "y"}, None, "fits no shape of this data set"),
    ],
)
def test_what_is_no_shape_or_several(kind, row, columns, shape, message):
    with pytest.raises(DataError) as caught:
        read(kind, row, columns, shape)
    assert message in str(caught.value)


def test_a_named_shape_or_mapped_columns_decide_between_several():
    row = {"messages": [U, A], "text": "x", "body": "y"}
    assert read("sft", row, shape="text") == ("text", {"text": "x"})
    assert read("sft", row, {"text": "body"}) == ("text", {"text": "y"})
    row = {"prompt": "p", "messages": [U], "chosen": "a", "rejected": "b"}
    assert read("pairs", row, shape="prompt")[1] == {"prompt": "p", "chosen": "a", "rejected": "b"}


def test_columns_may_share_a_source_and_hide_their_namesakes():
    row = {"prompt": "theirs", "question": "q", "label": "old"}
    assert renamed(row, {"prompt": "question", "label": "question"}) == {"prompt": "q", "label": "q"}
    assert renamed({"a": 1}, {"prompt": "b"}) == {"a": 1, "prompt": None}
    row = {"conversations": [HUMAN], "dialog": [U, A]}
    assert renamed(row, {"messages": "dialog"}) == {"conversations": [HUMAN], "messages": [U, A]}


def test_unused_columns_are_named():
    row = {"prompt": "a", "response": "b", "input": "c", "id": 3, "empty": None}
    assert recognise([row], "sft").unused == ("input", "id")


@pytest.mark.parametrize(
    ("kind", "row", "keys"),
    [
        ("sft", {"messages": [{**U, "refusal": None}, {**A, "refusal": "no", "name": "x"}]}, ("refusal",)),
        ("sft", {"conversations": [HUMAN, {**GPT, "rating": 3, "markdown": ""}]}, ("rating",)),
        ("pairs", {"prompt": "p", "chosen": {**A, "a": 1}, "rejected": [{**WRONG, "b": [2]}]}, ("a", "b")),
        ("prompts", {"prompt": [{**U, "lang": "en"}], "label": "3", "tools": TOOLS}, ("lang",)),
        ("steps", {"prompt": "p", "steps": ["a"], "labels": [True]}, ()),
    ],
)
def test_keys_of_messages_that_are_not_read_are_named(kind, row, keys):
    assert recognise([renamed(row, {})], kind).unused_keys == keys


def test_a_mapped_column_that_no_row_has_is_refused():
    rows = [{"q": "a"}, {"q": "b", "context": None}]
    check_mapped(rows, {"prompt": "q", "input": "context"})
    with pytest.raises(DataError) as caught:
        check_mapped(rows, {"prompt": "q", "input": "contxt", "system": "sys"})
    message = "has no column contxt (for input), sys (for system), which `columns` maps; it has context, q"
    assert str(caught.value) == message
