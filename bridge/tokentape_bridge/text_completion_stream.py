"""Streamed plain completions, from request to frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from tokentape_bridge.answer_stream import PlainText
from tokentape_bridge.choice_stream import LONG_DELTA, ChoiceDelta, read_deltas
from tokentape_bridge.completion import CallEvent, read_started
from tokentape_bridge.completions import TextJob, prepare, run_all
from tokentape_bridge.frame_stream import FrameStream
from tokentape_bridge.merged import merged
from tokentape_bridge.sse import DONE, data_frame
from tokentape_bridge.text_chunks import TextChunks
from tokentape_bridge.text_responses import text_options
from tokentape_bridge.text_schemas import CompletionRequest
from tokentape_bridge.text_stream import TextStream


class TextCompletionStream(FrameStream[CompletionRequest]):
    """The answer to one request. Until it begins it raises `ApiError`, also for what the sidecar says."""

    @asynccontextmanager
    async def _accepted(self) -> AsyncGenerator[AsyncGenerator[bytes]]:
        job = await prepare(self._pool, self._request, self._tape_id)
        async with AsyncExitStack() as opened:
            opened.enter_context(job.sidecar.occupied())
            events = [await opened.enter_async_context(aclosing(job.sidecar.generate(call))) for call in job.calls]
            started = await run_all(read_started(each) for each in events)
            chunks = TextChunks(
                self._request,
                job.prompts,
                started,
                model=job.model,
                tape_id=self._tape_id,
                tokenizer=job.served.chat.tokenizer,
            )
            self.extension = chunks.extension
            yield self._answer(job, chunks, events)

    async def _answer(
        self, job: TextJob, chunks: TextChunks, events: list[AsyncGenerator[CallEvent]]
    ) -> AsyncGenerator[bytes]:
        if chunks.opening_token_count < LONG_DELTA:
            yield _opening(chunks)
        else:
            yield await asyncio.to_thread(_opening, chunks)
        sources = [read_deltas(each, self._streams(job)) for each in events]
        async with merged(sources) as deltas:
            async for prompt, added in deltas:
                if frame := await _frame(chunks, prompt, added):
                    yield frame
        closing = chunks.closing()
        yield (data_frame(closing) if closing else b"") + DONE

    def _streams(self, job: TextJob) -> list[PlainText]:
        chat, options = job.served.chat, text_options(self._request)
        options = replace(options, stop_token_ids=options.stop_token_ids | chat.stop_token_ids)
        return [PlainText(TextStream(chat.tokenizer, options)) for _ in range(self._request.n or 1)]


def _opening(chunks: TextChunks) -> bytes:
    return b"".join(map(data_frame, chunks.opening()))


async def _frame(chunks: TextChunks, prompt: int, added: ChoiceDelta) -> bytes:
    if len(added.token_ids) < LONG_DELTA:
        chunk = chunks.chunk(prompt, added)
    else:
        chunk = await asyncio.to_thread(chunks.chunk, prompt, added)
    return data_frame(chunk) if chunk else b""
