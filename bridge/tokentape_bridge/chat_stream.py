"""Streamed chat completions, from request to frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from tokentape_bridge.answer_stream import AnswerStream
from tokentape_bridge.chat import Chat, prepare
from tokentape_bridge.chat_chunks import ChatChunks
from tokentape_bridge.choice_stream import LONG_DELTA, ChoiceDelta, read_deltas
from tokentape_bridge.completion import read_started
from tokentape_bridge.frame_stream import FrameStream
from tokentape_bridge.responses import Json, extension
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.sidecar_pool import SidecarPool
from tokentape_bridge.sse import DONE, data_frame
from tokentape_bridge.text_responses import text_options


@dataclass(frozen=True, slots=True)
class RunningChat:
    """A chat that the engine has accepted."""

    chat: Chat
    call_id: str
    prompt_token_count: int
    extension: Json
    """What the answer says of its place on the tape."""
    deltas: AsyncGenerator[ChoiceDelta]
    """What its choices say, as they come."""


@asynccontextmanager
async def running(pool: SidecarPool, request: ChatCompletionRequest, tape_id: str) -> AsyncGenerator[RunningChat]:
    """Give the chat of `request` once the engine has accepted it; on leaving, it is aborted unless it has ended.

    Raises `ApiError` for what is wrong with the request, `AioRpcError` for what the sidecar says.
    """
    async with prepare(pool, request, tape_id) as chat, aclosing(chat.sidecar.generate(chat.call)) as events:
        started = await read_started(events)
        streams, told = await asyncio.to_thread(_beginning, chat, request, tape_id, started.call_id)
        async with aclosing(read_deltas(events, streams)) as deltas:
            yield RunningChat(chat, started.call_id, started.prompt_token_count, told, deltas)


def _beginning(
    chat: Chat, request: ChatCompletionRequest, tape_id: str, call_id: str
) -> tuple[list[AnswerStream], Json]:
    """Return what reads the choices, and what the answer says of its place. CPU work, of the size of the messages."""
    model, conversation = chat.served.chat, chat.conversation
    streams = model.answer_streams(
        conversation, request.n or 1, with_tools=request.tool_choice != "none", options=text_options(request)
    )
    return streams, extension(tape_id, call_id, chat.prompt, conversation, model.tokenizer)


class ChatStream(FrameStream[ChatCompletionRequest]):
    """The answer to one chat. Until it begins it raises what `running` does."""

    @asynccontextmanager
    async def _accepted(self) -> AsyncGenerator[AsyncGenerator[bytes]]:
        async with running(self._pool, self._request, self._tape_id) as chat:
            self.extension = chat.extension
            yield _frames(self._request, chat)


async def _frames(request: ChatCompletionRequest, running_chat: RunningChat) -> AsyncGenerator[bytes]:
    chat = running_chat.chat
    chunks = ChatChunks(
        request,
        call_id=running_chat.call_id,
        model=chat.model_name,
        prompt_token_count=running_chat.prompt_token_count,
        tokenizer=chat.served.chat.tokenizer,
    )
    prompt_token_ids = chat.prompt.whole if request.wants_token_ids else None
    # Ids alone are written in half a millisecond, 100,000 of them: no work for a thread.
    yield b"".join(map(data_frame, chunks.opening(running_chat.extension, prompt_token_ids)))
    async for added in running_chat.deltas:
        if len(added.token_ids) < LONG_DELTA:
            frame = _frame(chunks, added)
        else:
            frame = await asyncio.to_thread(_frame, chunks, added)
        if frame:
            yield frame
    closing = chunks.closing()
    yield (data_frame(closing) if closing else b"") + DONE


def _frame(chunks: ChatChunks, added: ChoiceDelta) -> bytes:
    chunk = chunks.chunk(added)
    return data_frame(chunk) if chunk else b""
