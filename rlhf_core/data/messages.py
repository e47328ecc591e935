"""Conversations in any of the common forms, as canonical messages.

A canonical message is {"role": "system"|"user"|"assistant"|"tool", "content": str} and, where given, "tool_calls":
[{"type": "function", "function": {"name": str, "arguments": dict}}], "reasoning_content": str, "weight": float (an
assistant message's loss weight), and the names by which results and calls find each other: "name", "tool_call_id" of a
result, "id" of a call.
"""

import json
import math
from typing import Any

from rlhf_core.data.errors import BadRow

Message = dict[str, Any]

# What ShareGPT calls the speakers, beside the names of chat templates.
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = ("tool_calls", "function_call")
_WEIGHT = ("weight", "loss_weight")
_CONTENT = ("content", "value")
_KEPT = ("name", "tool_call_id")
_READ = {"role", "from", *_CONTENT, *_CALLS, *_REASONING, *_WEIGHT, *_KEPT}
_VISION = ("image", "images", "image_url", "video", "videos", "video_url", "audio", "audios", "input_audio")
NO_VISION = "vision-language models are not supported"


def is_empty(value: Any) -> bool:
    """What is missing, and how pandas writes it: NaN."""
    if value is None:  # first, because most of what is asked for is not there
        return True
    if isinstance(value, str | list | dict):
        return not value
    return isinstance(value, float) and math.isnan(value)


def shown(value: Any) -> str:
    """A value in an error message, short."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


def looks_like_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def says_from(messages: list[Any]) -> bool:
    """Whether the speakers are called `from`, as in ShareGPT, and not `role`."""
    return any(isinstance(one, dict) and "from" in one for one in messages)


def read_messages(value: Any, column: str) -> list[Message]:
    """A conversation as canonical messages. `column` is for the message. Raises BadRow."""
    if isinstance(value, dict):
        value = [value]
    if not looks_like_messages(value):
        raise BadRow(f"column {column} is no conversation", f"it holds {shown(value)}; give a list of messages")
    return [_read_message(raw) for raw in value]


def _read_message(raw: dict[str, Any]) -> Message:
    said = raw.get("role") or raw.get("from")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRow("a message's role is not known", f"{shown(said)}; known are {', '.join(_ROLES)}")
    if any(not is_empty(raw.get(name)) for name in _VISION):
        raise BadRow(NO_VISION, "a message comes with images, video or audio")
    content, calls = _given(raw, _CONTENT), _given(raw, _CALLS)
    if said == "function_call":
        content, calls = None, content
    message: Message = {"role": role, "content": _read_content(content)}
    if calls is not None or said == "function_call":
        message["tool_calls"] = _read_calls(_parsed(calls, "a tool call"))
    reasoning = _given(raw, _REASONING)
    if reasoning is not None:
        message["reasoning_content"] = _read_reasoning(reasoning)
    message |= {name: raw[name] for name in _KEPT if not is_empty(raw.get(name))}
    if is_empty(message["content"]) and not message.keys() & {"tool_calls", "reasoning_content"} and role != "tool":
        raise BadRow(f"a message of the {role} is empty")
    return _with_weight(message, raw)


def _given(raw: dict[str, Any], names: tuple[str, ...]) -> Any:
    """What a message has under one of the names that mean the same; None where it has nothing. Raises BadRow."""
    found = {name: raw[name] for name in names if not is_empty(raw.get(name))}
    first = next(iter(found.values()), None)
    if any(value != first for value in found.values()):
        raise BadRow(f"a message has {' and '.join(found)}, which mean the same and differ")
    return first


def unread_keys(value: Any) -> list[str]:
    """What messages say beside what is read, such as a model's `refusal`; nothing for a text."""
    messages = [value] if isinstance(value, dict) else value
    if not looks_like_messages(messages):
        return []
    return [name for raw in messages for name, item in raw.items() if name not in _READ and not is_empty(item)]


def _read_reasoning(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRow("a message's reasoning is not text", shown(value))
    return value


def _with_weight(message: Message, raw: dict[str, Any]) -> Message:
    weight = _given(raw, _WEIGHT)
    if weight is None:
        return message
    if not isinstance(weight, bool | int | float) or not math.isfinite(weight) or weight < 0:
        raise BadRow("a message's weight is not a number from 0 on", shown(weight))
    if message["role"] == "assistant":
        return {**message, "weight": float(weight)}
    if weight:
        raise BadRow(
            "a message that is not the assistant's has a loss weight",
            f"{weight} on one of the {message['role']}; only the assistant's are trained on",
        )
    return message


def _read_content(content: Any) -> str:
    """Text, also where it comes as a list of parts: {"type": "text", "text" or "value": ...}, joined without a gap."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not looks_like_messages(content):
        if content == []:
            return ""
        raise BadRow("a message's content is neither text nor a list of parts", shown(content))
    return "".join(map(_read_part, content))


def _read_part(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind in _VISION:
        raise BadRow(NO_VISION, f"a message has a part of type {kind}")
    text = part.get("text") if "text" in part else part.get("value")
    if kind != "text" or not isinstance(text, str):
        raise BadRow("a part of a message is not text", f'{shown(part)}; a part is {{"type": "text", "text": ...}}')
    return text


def _parsed(value: Any, what: str) -> Any:
    """A value that may come as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise BadRow(f"{what} is not JSON", shown(value)) from None


def _read_calls(value: Any) -> list[dict[str, Any]]:
    calls = [value] if isinstance(value, dict) else value
    if not looks_like_messages(calls):
        raise BadRow("tool calls are not a list of objects", shown(value))
    return [_read_call(call) for call in calls]


def _read_call(raw: dict[str, Any]) -> dict[str, Any]:
    """From {"function": {"name", "arguments"}} or {"name", "arguments"}; the arguments may be JSON text."""
    function = raw.get("function") if isinstance(raw.get("function"), dict) else raw
    assert isinstance(function, dict)
    name, arguments = function.get("name"), function.get("arguments")
    arguments = {} if is_empty(arguments) else _parsed(arguments, "a tool call's arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise BadRow(
            "a tool call has no name or no arguments", f'{shown(raw)}; a call is {{"name": ..., "arguments": {{...}}}}'
        )
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": raw["id"]} if not is_empty(raw.get("id")) else call


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Tool descriptions, from a list or JSON text, each as {"type": "function", "function": {"name", ...}}."""
    tools = [] if is_empty(value) else _parsed(value, "column tools")
    tools = [tools] if isinstance(tools, dict) else tools
    if not is_empty(tools) and not looks_like_messages(tools):
        raise BadRow("column tools is not a list of objects", shown(value))
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
