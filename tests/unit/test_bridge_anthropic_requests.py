"""Requests of the Messages API as those of a chat, and what is refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from anthropic import types
from anthropic.types.message_create_params import MessageCreateParamsBase
from pydantic import BaseModel, ValidationError

from support.messages import Json
from tokentape_bridge.anthropic_api import schemas
from tokentape_bridge.anthropic_api.errors import translated
from tokentape_bridge.anthropic_api.requests import to_chat, to_tokenize
from tokentape_bridge.anthropic_api.schemas import CountTokensRequest, MessageRequest
from tokentape_bridge.errors import ApiError, to_json

HI: Json = {"role": "user", "content": "hi"}
BODY: Json = {"model": "m", "max_tokens": 5, "messages": [HI]}
CALL: Json = {"type": "tool_use", "id": "i", "name": "ls", "input": {"p": [1.0, None]}}


def chat_of(**fields: Any) -> Json:
    return to_chat(MessageRequest.model_validate(BODY | fields)).model_dump(exclude_none=True, by_alias=True)


def said(*messages: Json, **fields: Any) -> list[Json]:
    return chat_of(messages=list(messages), **fields)["messages"]


def text(*texts: str) -> list[Json]:
    return [{"type": "text", "text": it, "cache_control": {"type": "ephemeral"}} for it in texts]


def result(call_id: str, **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


CONVERSATIONS: list[tuple[list[Json], list[Json]]] = [
    ([HI], [HI]),
    ([{"role": "user", "content": text("a", "b")}], [{"role": "user", "content": "ab"}]),
    ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    ([HI, {"role": "system", "content": "s"}], [HI, {"role": "system", "content": "s"}]),
    (
        [
            {
                "role": "user",
                "content": [result("a", content="A"), result("b", content=text("B", "C"), is_error=True)],
            }
        ],
        [
            {"role": "tool", "tool_call_id": "a", "content": "A"},
            {"role": "tool", "tool_call_id": "b", "content": "BC"},
        ],
    ),
    (
        [{"role": "user", "content": [*text("x"), result("a"), *text("y", "z")]}],
        [
            {"role": "user", "content": "x"},
            {"role": "tool", "tool_call_id": "a", "content": ""},
            {"role": "user", "content": "yz"},
        ],
    ),
    (
        [
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, *text("a", "b"), CALL],
            },
            HI,
        ],
        [
            {
                "role": "assistant",
                "content": "ab",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "i", "type": "function", "function": {"name": "ls", "arguments": '{"p": [1.0, null]}'}}
                ],
            },
            HI,
        ],
    ),
    ([{"role": "assistant", "content": []}, HI], [{"role": "assistant", "content": ""}, HI]),
]


@pytest.mark.parametrize(("messages", "expected"), CONVERSATIONS)
def test_messages_become_those_of_a_chat(messages: list[Json], expected: list[Json]) -> None:
    assert said(*messages) == expected


def test_the_system_prompt_is_the_first_message() -> None:
    assert said(HI, system="s") == said(HI, system=text("s")) == [{"role": "system", "content": "s"}, HI]
    assert said(HI, system=text("a", "b"))[0]["content"] == "ab"
    assert said(HI, system="") == [{"role": "system", "content": ""}, HI]
    assert said(HI, system=[]) == [HI]


def test_what_claude_code_tells_anthropic_s_servers_is_no_part_of_the_prompt() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=8f2a1;"
    assert said(HI, system=text(billing, "s")) == said(HI, system="s")
    assert said(HI, system=text(billing)) == [HI]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        ),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"metadata": {"user_id": None, "tape_id": "t"}}, {"metadata": {"tape_id": "t"}}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none", "parallel_tool_calls": True}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "ls", "disable_parallel_tool_use": False}},
            {"tool_choice": {"type": "function", "function": {"name": "ls"}}, "parallel_tool_calls": True},
        ),
        (
            {"tools": [{"name": "ls", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "ls", "description": "d", "parameters": {"type": "object"}},
                    }
                ]
            },
        ),
        ({"messages": [HI, {"role": "assistant", "content": "We"}]}, {"continue_final_message": True}),
    ],
)
def test_fields_become_those_of_a_chat(fields: Json, expected: Json) -> None:
    without = chat_of()
    made = {key: value for key, value in chat_of(**fields).items() if key != "messages" and value != without.get(key)}
    assert made == expected


def test_the_count_is_of_the_same_prompt() -> None:
    fields: Json = {
        "system": "s",
        "tools": [{"name": "ls", "input_schema": {}}],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "messages": [HI, {"role": "assistant", "content": "We"}],
    }
    counted = to_tokenize(CountTokensRequest.model_validate({"model": "m", **fields})).model_dump(exclude_none=True)
    asked = chat_of(**fields)
    assert {key: asked[key] for key in counted} == counted
    assert asked.keys() - counted.keys() == {"max_tokens"}


@pytest.mark.parametrize(
    ("fields", "place", "problem"),
    [
        ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, "messages.0.user.content.0", f"'{kind}'")
        for kind in ("image", "document", "search_result", "tool_use", "thinking")
    ]
    + [
        (
            {"messages": [{"role": "assistant", "content": [{"type": kind}]}]},
            "messages.0.assistant.content.0",
            f"'{kind}'",
        )
        for kind in ("redacted_thinking", "server_tool_use", "tool_result")
    ]
    + [
        (
            {"messages": [{"role": "user", "content": [result("a", content=[{"type": "image"}])]}]},
            "messages.0.user.content.0.tool_result.content.0",
            "'image'",
        ),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages.0", "'developer'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.user.content", "list"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.user.content.0", "object"),
        ({"system": [{"type": "image"}]}, "system.0", "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0", "'web_search_20250305'"),
        ({"tools": [{"name": "ls"}]}, "tools.0.input_schema", "required"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type", "auto"),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "enabled"),
    ],
)
def test_what_has_no_place_in_a_chat_is_refused_by_name(fields: Json, place: str, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MessageRequest.model_validate(BODY | fields)
    first = caught.value.errors()[0]
    assert ".".join(map(str, first["loc"])) == place
    assert problem in first["msg"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [HI, {"role": "assistant", "content": [CALL]}]}, "messages"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
    ],
)
def test_what_no_chat_can_do_is_refused(fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_of(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


PACKAGE: dict[type[BaseModel], Any] = {
    MessageRequest: MessageCreateParamsBase,
    CountTokensRequest: types.MessageCountTokensParams,
    schemas.Tool: types.ToolParam,
    schemas.TextBlock: types.TextBlockParam,
    schemas.ThinkingBlock: types.ThinkingBlockParam,
    schemas.ToolUseBlock: types.ToolUseBlockParam,
    schemas.ToolResultBlock: types.ToolResultBlockParam,
    schemas.UserMessage: types.UserMessageParam,
    schemas.AssistantMessage: types.AssistantMessageParam,
    schemas.SystemMessage: types.SystemMessageParam,
    schemas.OutputConfig: types.OutputConfigParam,
    schemas.OutputFormat: types.JSONOutputFormatParam,
    schemas.Thinking: types.ThinkingConfigEnabledParam,
    schemas.ToolChoice: types.ToolChoiceToolParam,
    schemas.Metadata: types.MetadataParam,
}
SENT_AS_A_HEADER = {"workspace_id"}


@pytest.mark.parametrize("model", PACKAGE, ids=lambda model: model.__name__)
def test_the_models_have_the_fields_of_the_package(model: type[BaseModel]) -> None:
    theirs = set(typing.get_type_hints(PACKAGE[model])) - SENT_AS_A_HEADER
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    assert theirs <= fields.keys()
    required = PACKAGE[model].__required_keys__ - {"budget_tokens", "signature", "name"}
    assert required <= {name for name, field in fields.items() if field.is_required()}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ApiError("stop: is wrong", param="stop"), "invalid_request_error", "stop_sequences: is wrong"),
        (ApiError("who?", status=401, code="invalid_api_key"), "authentication_error", "who?"),
        (ApiError("no model", status=404, code="model_not_found"), "not_found_error", "no model"),
        (ApiError("big", status=413, code="request_too_large"), "request_too_large", "big"),
        (ApiError("text", status=415), "invalid_request_error", "text"),
        (ApiError("it broke", status=500, code="engine_error"), "api_error", "it broke"),
        (ApiError("gone", status=503, code="sidecar_unavailable"), "overloaded_error", "gone"),
        (ApiError("slow", status=504, code="sidecar_timeout"), "timeout_error", "slow"),
        (
            ApiError("the maximum context length is 8", code="context_length_exceeded"),
            "invalid_request_error",
            "prompt is too long: the maximum context length is 8",
        ),
        (
            ApiError("messages.3.user.content.0: no", param="messages.3.user.content.0"),
            "invalid_request_error",
            "messages.3.content.0: no",
        ),
    ],
)
def test_errors_have_anthropic_s_shape(error: ApiError, kind: str, message: str) -> None:
    made = translated(to_json(error), error.status)
    details = {"details": {"error_code": error.code}} if error.code else {}
    assert made == {"type": "error", "error": {"type": kind, "message": message, **details}}
