from __future__ import annotations

from typing import Any

import pytest

from tokentape_bridge.errors import ApiError
from tokentape_bridge.messages import to_template_messages
from tokentape_bridge.schemas import Message


def rendered(**fields: Any) -> dict[str, Any]:
    [message] = to_template_messages([Message.model_validate(fields)])
    return message


def call(arguments: str | None) -> Any:
    tool_calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    message = rendered(role="assistant", tool_calls=tool_calls)
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_no_content_is_the_empty_string(content: dict[str, Any]) -> None:
    assert rendered(role="assistant", **content) == {"role": "assistant", "content": ""}


def test_parts_are_joined_without_separator() -> None:
    parts = [{"type": "text", "text": "22C"}, {"type": "text", "text": " sunny"}]
    assert rendered(role="tool", content=parts, tool_call_id="c1") == {
        "role": "tool",
        "content": "22C sunny",
        "tool_call_id": "c1",
    }


def test_developer_is_system() -> None:
    assert rendered(role="developer", content="x")["role"] == "system"


def test_what_templates_do_not_know_stays_out() -> None:
    message = rendered(role="assistant", content="x", tool_calls=[], refusal=None, prompt_token_ids=[1])
    assert message == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_both_names_of_reasoning_are_one(field: str) -> None:
    assert rendered(role="assistant", content="x", **{field: "because"})["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":  [1, "b"]}', {"a": [1, "b"]}),
        ("{}", {}),
        (None, {}),
        (" ", {}),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_objects_where_they_spell_one(text: str | None, expected: object) -> None:
    assert call(text) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"role": "critic"}, "messages.1.role"),
        ({"role": "user", "content": 5}, "messages.1.content"),
        ({"role": "user", "content": ["x"]}, "messages.1.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages.1.content.0"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}, "messages.1.content.1"),
    ],
)
def test_what_no_template_could_take_is_named(fields: dict[str, Any], param: str) -> None:
    messages = [Message(role="user", content="hi"), Message.model_validate(fields)]
    with pytest.raises(ApiError) as caught:
        to_template_messages(messages)
    assert caught.value.param == param
