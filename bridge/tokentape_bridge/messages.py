"""Messages as chat templates take them: plain dicts of strings.

A list of text parts is joined without a separator, so that it equals the same text in one string; null, absent and
empty content are all the empty string; `developer` becomes `system`; a tool call's arguments become an object where
they are one, since templates write them as JSON themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from tokentape_bridge.errors import ApiError
from tokentape_bridge.schemas import Message, ToolCall

TemplateMessage = dict[str, Any]
"""A message for a chat template."""

_TEMPLATE_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def to_template_messages(messages: Sequence[Message], *, last_is_open: bool = False) -> list[TemplateMessage]:
    """Return `messages` for the chat template. Raises `ApiError` naming the field that no template could take.

    `last_is_open`: whether the model is to write on in the last one, which then must be the assistant's.
    """
    if not messages:
        raise ApiError("messages: at least one message is needed", param="messages")
    if last_is_open and messages[-1].role != "assistant":
        problem = "continue_final_message: needs a last message of the assistant"
        raise ApiError(problem, param="continue_final_message", code="invalid_value")
    if last_is_open and messages[-1].tool_calls:
        problem = "continue_final_message: a last message with tool_calls has no open end"
        raise ApiError(problem, param="continue_final_message", code="invalid_value")
    return [_to_template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _to_template_message(message: Message, path: str) -> TemplateMessage:
    role = _TEMPLATE_ROLES.get(message.role)
    if role is None:
        known = ", ".join(_TEMPLATE_ROLES)
        raise ApiError(f"{path}.role: {message.role[:40]!a} is not one of {known}", param=f"{path}.role")
    rendered: TemplateMessage = {"role": role, "content": _text(message.content, f"{path}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [_to_template_tool_call(call) for call in message.tool_calls]
    return rendered


def _text(content: object, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{path}: must be a string, null or a list of text parts", param=path)
    parts = cast("list[object]", content)
    return "".join(_part_text(part, f"{path}.{index}") for index, part in enumerate(parts))


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise ApiError(f"{path}: must be an object with a type", param=path)
    fields = cast("dict[str, object]", part)
    if fields.get("type") != "text":
        kind = str(fields.get("type"))[:40]
        raise ApiError(f"{path}: parts of type {kind!a} are not supported, only text", param=path)
    text = fields.get("text")
    if not isinstance(text, str):
        raise ApiError(f"{path}.text: must be a string", param=f"{path}.text")
    return text


def _to_template_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    rendered: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        rendered["id"] = call.id
    return rendered


def _arguments(text: str | None) -> object:
    """Return the object that `text` spells, or `text` itself where it spells none: the model's words are not mended."""
    if text is None or not text.strip():
        return {}
    try:
        arguments: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, object]", arguments) if isinstance(arguments, dict) else text
