"""Anthropic's messages as those of a chat.

A user message with tool results is several messages of a chat: each result one of a tool, the text between them one of
the user, in their order. Blocks of text are joined without a separator, as a chat's parts are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

from tokentape_bridge import schemas
from tokentape_bridge.anthropic_api.schemas import (
    AssistantMessage,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

_BILLING = "x-anthropic-billing-header:"
"""What a block of Claude Code's system prompt begins with that is for Anthropic's servers and differs in each call."""


def to_chat_messages(system: Sequence[TextBlock] | None, messages: Sequence[Message]) -> list[schemas.Message]:
    """Return the messages of a chat that say the same. A conversation's system prompt is its first message."""
    prompt = [block for block in system or () if not block.text.startswith(_BILLING)]
    said = [schemas.Message(role="system", content=_text(prompt))] if prompt else []
    return said + [made for message in messages for made in _to_chat(message)]


def _to_chat(message: Message) -> Iterator[schemas.Message]:
    if isinstance(message, UserMessage):
        yield from _of_user(message)
    elif isinstance(message, AssistantMessage):
        yield _of_assistant(message)
    else:
        yield schemas.Message(role="system", content=_text(message.content))


def _of_user(message: UserMessage) -> Iterator[schemas.Message]:
    if not message.content:
        yield schemas.Message(role="user", content="")
    for is_result, blocks in itertools.groupby(message.content, lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            yield schemas.Message(role="user", content=_text(blocks))
            continue
        for block in blocks:
            assert isinstance(block, ToolResultBlock)
            yield schemas.Message(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content or ()))


def _of_assistant(message: AssistantMessage) -> schemas.Message:
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    return schemas.Message(
        role="assistant",
        content=_text(message.content),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _call(block: ToolUseBlock) -> schemas.ToolCall:
    function = schemas.Function(name=block.name, arguments=json.dumps(block.input))
    return schemas.ToolCall(id=block.id, type="function", function=function)


def _text(blocks: Sequence[object] | Iterator[object]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
