import pytest

from rlhf_core.data.errors import BadRow
from rlhf_core.data.messages import read_messages, read_tools

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        ({"from": "human", "value": "hi"}, {"role": "user", "content": "hi"}),
        ({"from": "gpt", "value": "hi"}, {"role": "assistant", "content": "hi"}),
        ({"from": "system", "value": "be kind"}, {"role": "system", "content": "be kind"}),
        ({"from": "observation", "value": '{"sum": 3}'}, {"role": "tool", "content": '{"sum": 3}'}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "value": "b"}]},
            {"role": "user", "content": "a b"},
        ),
        (
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"from": "function_call", "value": '[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "now"}]'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [CALL, {"type": "function", "function": {"name": "now", "arguments": {}}}],
            },
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "c1"}]},
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c1"}]},
        ),
        (
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        ),
        ({"role": "tool", "content": ""}, {"role": "tool", "content": ""}),
        (
            {"role": "assistant", "content": "3", "reasoning_content": "1+2"},
            {"role": "assistant", "content": "3", "reasoning_content": "1+2"},
        ),
        (
            {"role": "assistant", "content": "3", "reasoning": "1+2", "reasoning_content": "1+2"},
            {"role": "assistant", "content": "3", "reasoning_content": "1+2"},
        ),
        (
            {"role": "assistant", "content": "3", "reasoning": "", "thinking": "1+2"},
            {"role": "assistant", "content": "3", "reasoning_content": "1+2"},
        ),
        # OpenAI's interface before it had tool_calls, and the result with its role.
        (
            {"role": "assistant", "content": "Wait.", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
        ),
        ({"role": "function", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "3"}),
        (
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}', "weight": 0},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 0.0},
        ),
        (
            {"role": "assistant", "content": "3", "loss_weight": 0.5},
            {"role": "assistant", "content": "3", "weight": 0.5},
        ),
        ({"role": "assistant", "content": "3", "weight": 0}, {"role": "assistant", "content": "3", "weight": 0.0}),
        ({"role": "assistant", "content": "3", "weight": None}, {"role": "assistant", "content": "3"}),
        ({"role": "user", "content": "3", "loss_weight": 0.0}, {"role": "user", "content": "3"}),
    ],
)
def test_a_message_in_canonical_form(raw, message):
    assert read_messages([raw], "messages") == [message]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"role": "narrator", "content": "x"}, "a message's role is not known: str 'narrator'; known are system, user"),
        ({"content": "x"}, "a message's role is not known: NoneType None"),
        ({"role": "user", "content": ""}, "a message of the user is empty"),
        ({"role": "assistant", "content": []}, "a message of the assistant is empty"),
        ({"role": "user", "content": 3}, "a message's content is neither text nor a list of parts: int 3"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "vision-language models are not supported"),
        ({"role": "user", "content": "x", "images": ["y"]}, "vision-language models are not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of a message is not text: dict"),
        ({"role": "user", "content": [{"type": "thought", "text": "x"}]}, "a part of a message is not text"),
        ({"from": "function_call", "value": "add(1)"}, "a tool call is not JSON: str 'add"),
        ({"from": "function_call", "value": "[]"}, "tool calls are not a list of objects"),
        ({"from": "function_call", "value": '{"arguments": {}}'}, "a tool call has no name or no arguments"),
        ({"from": "function_call", "value": '{"name": "a", "arguments": [1]}'}, "a tool call has no name or no"),
        ({"from": "function_call", "value": '{"name": "a", "arguments": "x"}'}, "a tool call's arguments is not JSON"),
        ({"role": "assistant", "content": "x", "weight": -1}, "a message's weight is not a number from 0 on: int -1"),
        ({"role": "assistant", "content": "x", "weight": "1"}, "a message's weight is not a number from 0 on: str"),
        ({"role": "assistant", "content": "x", "thinking": ["y"]}, "a message's reasoning is not text: list ['y']"),
        (
            {"role": "assistant", "content": "x", "reasoning": "y", "thinking": "z"},
            "a message has reasoning and thinking, which mean the same and differ",
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [CALL], "function_call": {"name": "now"}},
            "a message has tool_calls and function_call, which mean the same and differ",
        ),
        ({"role": "user", "content": "x", "weight": 1}, "a message that is not the assistant's has a loss weight"),
    ],
)
def test_a_message_that_cannot_be_used(raw, reason):
    with pytest.raises(BadRow) as caught:
        read_messages([raw], "messages")
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("value", ["hi", ["hi"], [], 3, None])
def test_what_is_no_conversation(value):
    with pytest.raises(BadRow, match=r"column chat is no conversation: it holds .*; give a list of messages"):
        read_messages(value, "chat")


def test_tools_from_text_or_list_flat_or_wrapped():
    flat = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": flat}]
    assert read_tools([flat]) == read_tools(wrapped) == wrapped
    assert read_tools('[{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]') == wrapped
    assert read_tools("[]") == read_tools([]) == read_tools(None) == read_tools("") == []
    for bad, reason in (("[", "column tools is not JSON"), ("[1]", "column tools is not a list of objects")):
        with pytest.raises(BadRow, match=reason):
            read_tools(bad)
