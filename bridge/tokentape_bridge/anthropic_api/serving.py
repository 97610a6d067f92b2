"""Messages from request to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from anthropic.types import MessageTokensCount

from tokentape_bridge import tokens
from tokentape_bridge.anthropic_api.answers import PING, MessageAnswer
from tokentape_bridge.anthropic_api.errors import error_frame
from tokentape_bridge.anthropic_api.requests import to_chat, to_tokenize
from tokentape_bridge.anthropic_api.schemas import CountTokensRequest, MessageRequest
from tokentape_bridge.chat_stream import RunningChat, running
from tokentape_bridge.frame_stream import FrameStream
from tokentape_bridge.responses import Json
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.sidecar_pool import SidecarPool
from tokentape_bridge.sse import data_frame
from tokentape_bridge.tape_choice import requested_tape_id


class MessageCall(FrameStream[ChatCompletionRequest]):
    """A call for a message, to be answered once, streamed or not; its request is the chat that asks for the same."""

    async def complete(self) -> Json:
        """Return the body of the whole answer. Raises what `chat_stream.running` does, and of a stream that broke."""
        async with running(self._pool, self._request, self._tape_id) as chat:
            return self._answer(chat).whole([added async for added in chat.deltas])

    @asynccontextmanager
    async def _accepted(self) -> AsyncGenerator[AsyncGenerator[bytes]]:
        async with running(self._pool, self._request, self._tape_id) as chat:
            self.extension = chat.extension
            yield self._answer_frames(chat)

    async def _answer_frames(self, chat: RunningChat) -> AsyncGenerator[bytes]:
        answer = self._answer(chat)
        yield _frame(answer.opening())
        async for added in chat.deltas:
            if events := answer.events(added):
                yield _frame(events)

    def _error_frame(self, error: Exception) -> bytes:
        return error_frame(error)

    def _answer(self, chat: RunningChat) -> MessageAnswer:
        return MessageAnswer(
            call_id=chat.call_id,
            model=chat.chat.model_name,
            prompt_token_count=chat.prompt_token_count,
            extension=chat.extension,
            one_call_at_most=self._request.parallel_tool_calls is False,
        )


async def read_call(pool: SidecarPool, request: MessageRequest, header: str | None, path: str | None) -> MessageCall:
    """Return the call that `request` asks for; `header` and `path` are the tapes that these name.

    Raises `ApiError` for what no chat can do.
    """
    # A long history is a millisecond's work for each hundred messages.
    chat = await asyncio.to_thread(to_chat, request)
    return MessageCall(pool, chat, requested_tape_id(chat, header, path))


async def count_tokens(pool: SidecarPool, request: CountTokensRequest, header: str | None, path: str | None) -> Json:
    """Return how many tokens the prompt of `request` has; `header` and `path` are as in `read_call`."""
    source = await asyncio.to_thread(to_tokenize, request)
    answer = await tokens.tokenize(pool, source, requested_tape_id(source, header, path))
    return MessageTokensCount(input_tokens=answer["count"]).to_dict()


PING_FRAME = data_frame(PING, "ping")
"""The frame that keeps a silent stream open."""


def _frame(events: list[Json]) -> bytes:
    return b"".join(data_frame(event, event["type"]) for event in events)
