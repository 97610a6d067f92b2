"""Requests of the Messages API as those of a chat."""

from __future__ import annotations

from typing import Any

from tokentape_bridge.anthropic_api.history import to_chat_messages
from tokentape_bridge.anthropic_api.schemas import (
    AssistantMessage,
    CountTokensRequest,
    MessageRequest,
    Tool,
    ToolChoice,
    ToolUseBlock,
)
from tokentape_bridge.errors import ApiError
from tokentape_bridge.fields import Model, log_ignored_fields, reject_refused
from tokentape_bridge.sampling_fields import JsonSchema, ResponseFormat
from tokentape_bridge.schemas import ChatCompletionRequest, TokenizeRequest

_THINKS = {"enabled": True, "disabled": False}
"""What the template's argument `enable_thinking` is told; of the other types the template is not told anything."""


def to_chat(request: MessageRequest) -> ChatCompletionRequest:
    """Return the chat that `request` asks for, and log what means nothing in it; CPU work, of the history's length.

    Raises `ApiError` for what no chat can do.
    """
    return ChatCompletionRequest(
        **_prompt_source(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        response_format=_response_format(request),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=not request.tool_choice.disable_parallel_tool_use if request.tool_choice else None,
    )


def to_tokenize(request: CountTokensRequest) -> TokenizeRequest:
    """Return the request for the prompt of `request`; as `to_chat` in all else."""
    return TokenizeRequest(**_prompt_source(request))


def _prompt_source(request: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of a `PromptSource`, and the messages."""
    reject_refused(request)
    _log_ignored(request)
    metadata = request.metadata
    return {
        "model": request.model,
        "messages": to_chat_messages(request.system, request.messages),
        "tools": None if request.tools is None else [_tool(tool) for tool in request.tools],
        "chat_template_kwargs": _template_arguments(request),
        "reasoning_effort": request.output_config.effort if request.output_config else None,
        "continue_final_message": _is_begun(request) or None,
        "metadata": {"tape_id": metadata.tape_id} if metadata and metadata.tape_id is not None else None,
        "user": metadata.user_id if metadata else None,
    }


def _log_ignored(request: CountTokensRequest) -> None:
    """Log the fields that mean nothing here, of the request and of what is in it, each name once."""
    log_ignored_fields(request)
    for name in ("thinking", "tool_choice", "output_config", "metadata"):
        part: object = getattr(request, name)
        if isinstance(part, Model):
            log_ignored_fields(part, f"{name}.")
    for tool in request.tools or ():
        log_ignored_fields(tool, "tools[].")
    for block in request.system or ():
        log_ignored_fields(block, "system[].")
    for message in request.messages:
        log_ignored_fields(message, "messages[].")
        for block in message.content:
            log_ignored_fields(block, "messages[].content[].")


def _is_begun(request: CountTokensRequest) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = request.messages[-1] if request.messages else None
    if not isinstance(last, AssistantMessage):
        return False
    if any(isinstance(block, ToolUseBlock) for block in last.content):
        raise ApiError(
            "messages: the last one is the assistant's, which the model writes on, and it has tool_use blocks, after "
            "which it cannot; give the tools' results, or leave the blocks out",
            param="messages",
            code="invalid_value",
        )
    return True


def _template_arguments(request: CountTokensRequest) -> dict[str, Any] | None:
    thinks = _THINKS.get(request.thinking.type) if request.thinking else None
    if thinks is None:
        return request.chat_template_kwargs
    return {"enable_thinking": thinks} | (request.chat_template_kwargs or {})


def _tool(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice | None) -> object:
    match choice:
        case None:
            return None
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="tool", name=None):
            raise ApiError("tool_choice.name: is needed with this type", param="tool_choice.name", code="invalid_value")
        case ToolChoice(type="tool", name=name):
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice.type


def _response_format(request: MessageRequest) -> ResponseFormat | None:
    wanted = request.output_config.format if request.output_config else None
    if wanted is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema.model_validate({"schema": wanted.schema_}))
