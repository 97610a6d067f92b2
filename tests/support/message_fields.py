"""For each field of the Messages API in bridge/README.md: two requests that differ in nothing but that field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support.messages import Json

SECTION = "Anthropic's Messages API"
ROUTES = ("Messages", "Count tokens")

HI: Json = {"role": "user", "content": "Hello"}
LS: Json = {"name": "ls", "input_schema": {"type": "object"}}
TEXT: Json = {"type": "text", "text": "a"}
USE: Json = {"type": "tool_use", "id": "i", "name": "ls", "input": {}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "i", "content": "a"}
CACHE: Json = {"type": "ephemeral"}

BASE: Json = {"model": "toy", "messages": [HI]}
"""The least that a request must have, but for `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Example:
    """`asked` is what the field is in, `before` the same without it; `status` is the answer's."""

    asked: Json
    before: Json = field(default_factory=dict[str, Any])
    status: int = 200


def block(before: Json, **fields: Any) -> Example:
    """Fields of a block of a user's or an assistant's message."""
    role = "user" if before["type"] in ("text", "tool_result") else "assistant"

    def around(content: Json) -> Json:
        return {"messages": [HI, {"role": role, "content": [content]}, HI]}

    return Example(around({**before, **fields}), around(before))


def tool(**fields: Any) -> Example:
    """Fields of a tool."""
    return Example({"tools": [{**LS, **fields}]}, {"tools": [LS]})


def choice(asked: Json, before: Json) -> Example:
    """Two tool choices."""
    return Example({"tools": [LS], "tool_choice": asked}, {"tools": [LS], "tool_choice": before})


SCHEMA: Json = {"type": "json_schema", "schema": {"type": "object"}}

EXAMPLES: Mapping[str, Example] = {
    "model": Example({"model": "other"}, status=404),
    "messages": Example({"messages": [{"role": "user", "content": "Bye for now"}]}),
    "max_tokens": Example({"max_tokens": 3}),
    "system": Example({"system": "Be brief."}),
    "tools": Example({"tools": [LS]}),
    "tool_choice": Example({"tools": [LS], "tool_choice": {"type": "none"}}, {"tools": [LS]}),
    "thinking": Example({"thinking": {"type": "enabled"}}),
    "output_config": Example({"output_config": {"effort": "low"}}),
    "metadata": Example({"metadata": {"user_id": "b." + "0" * 32}}, status=400),
    "stop_sequences": Example({"stop_sequences": ["zebra"]}),
    "stream": Example({"stream": True}),
    "temperature": Example({"temperature": 0.5}),
    "top_p": Example({"top_p": 0.5}),
    "top_k": Example({"top_k": 5}),
    "chat_template_kwargs": Example({"chat_template_kwargs": {"shout": True}}),
    "mcp_servers": Example({"mcp_servers": [{"url": "x"}]}),
    "output_format": Example({"output_format": SCHEMA}),
    "container": Example({"container": "c"}),
    "cache_control": Example({"cache_control": CACHE}),
    "context_management": Example({"context_management": {"edits": []}}),
    "speed": Example({"speed": "fast"}),
    "user_profile_id": Example({"user_profile_id": "u"}),
    "diagnostics": Example({"diagnostics": {}}),
    "inference_geo": Example({"inference_geo": "eu"}),
    "service_tier": Example({"service_tier": "auto"}),
    "metadata.user_id": Example({"metadata": {"user_id": "b." + "0" * 32}}, status=400),
    "metadata.tape_id": Example({"metadata": {"tape_id": "b." + "0" * 32}}, status=400),
    "tool_choice.type": choice({"type": "any"}, {"type": "auto"}),
    "tool_choice.name": Example(
        {"tools": [LS], "tool_choice": {"type": "tool", "name": "rm"}},
        {"tools": [LS], "tool_choice": {"type": "tool", "name": "ls"}},
        status=400,
    ),
    "tool_choice.disable_parallel_tool_use": choice(
        {"type": "auto", "disable_parallel_tool_use": True}, {"type": "auto"}
    ),
    "thinking.type": Example({"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}),
    "thinking.budget_tokens": Example(
        {"thinking": {"type": "adaptive", "budget_tokens": 9}}, {"thinking": {"type": "adaptive"}}
    ),
    "thinking.display": Example(
        {"thinking": {"type": "adaptive", "display": "omitted"}}, {"thinking": {"type": "adaptive"}}
    ),
    "output_config.effort": Example({"output_config": {"effort": "low"}}),
    "output_config.format": Example({"output_config": {"format": SCHEMA}}),
    "tools[].name": tool(name="listing"),
    "tools[].description": tool(description="lists"),
    "tools[].input_schema": tool(input_schema={"type": "object", "properties": {}}),
    "tools[].type": Example({"tools": [{**LS, "type": "bash_20250124"}]}, {"tools": [LS]}, status=400),
    "tools[].strict": tool(strict=True),
    "tools[].cache_control": tool(cache_control=CACHE),
    "tools[].allowed_callers": tool(allowed_callers=["direct"]),
    "tools[].defer_loading": tool(defer_loading=True),
    "tools[].eager_input_streaming": tool(eager_input_streaming=True),
    "tools[].input_examples": tool(input_examples=[{}]),
    "messages[].role": Example({"messages": [{**HI, "role": "developer"}]}, status=400),
    "messages[].content": Example({"messages": [{**HI, "content": "Hello to you"}]}),
    "messages[].content[].type": Example({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, status=400),
    "messages[].content[].text": block(TEXT, text="a longer one"),
    "messages[].content[].thinking": block(
        {"type": "thinking", "thinking": "hm"}, thinking="well, I do not know at all"
    ),
    "messages[].content[].id": block(USE, id="another id"),
    "messages[].content[].name": block(USE, name="listing"),
    "messages[].content[].input": block(USE, input={"p": "a"}),
    "messages[].content[].tool_use_id": block(RESULT, tool_use_id="another id"),
    "messages[].content[].content": block(RESULT, content="a longer one"),
    "messages[].content[].is_error": block(RESULT, is_error=True),
    "messages[].content[].signature": block({"type": "thinking", "thinking": "hm"}, signature="s"),
    "messages[].content[].cache_control": block(TEXT, cache_control=CACHE),
    "messages[].content[].citations": block(TEXT, citations=[]),
    "messages[].content[].caller": block(USE, caller={"type": "direct"}),
    "messages[].content[].toolset_name": block(USE, toolset_name="t"),
}
