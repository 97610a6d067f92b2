"""The events of one call as they come: per choice its tokens, and what they say.

Invariants: every token once, in order, in the delta of the event that brought it, whether or not its text is certain
by then; each choice's last delta says how it ended and has no tokens; the parts of a choice's deltas join to what its
whole completion says. A stream that breaks the contract, or ends before all choices did, raises `StreamError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape.v1.types_pb2 import Completion as FinishedEvent
from tokentape_bridge.answer_parser import Content, Part, Reasoning
from tokentape_bridge.answer_stream import AnswerStream
from tokentape_bridge.completion import Choice, StreamError
from tokentape_bridge.tool_calls import ToolCall

LONG_DELTA = 256
"""From how many tokens on work on a delta is done in a thread: others would wait a millisecond for it."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one event adds to a choice. `token_ids`, `logprobs` and `top_logprobs` run in parallel."""

    index: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[list[tuple[int, float]]] = ()
    """Per token the most probable ones as (id, log-probability), best first; empty lists when none were asked for."""
    parts: Sequence[Part] = field(default_factory=tuple[Part, ...])
    """In the order in which they stand in the answer. Those of one kind are to be joined."""
    finished: FinishedEvent | None = None
    """How the choice ended, in its last delta."""

    @property
    def reasoning(self) -> str | None:
        """What it adds to the reasoning; `None` where it says nothing of any."""
        texts = [part.text for part in self.parts if isinstance(part, Reasoning)]
        return "".join(texts) if texts else None

    @property
    def content(self) -> str:
        """What it adds to the content."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that it adds, each a whole one."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


async def read_deltas(
    events: AsyncGenerator[GenerateResponse], streams: Sequence[AnswerStream]
) -> AsyncGenerator[ChoiceDelta]:
    """Yield what the `events` after the first add to the choices, of which `streams` has one each.

    Closing it closes `events`, which aborts the call. Raises `StreamError`, `TextStreamError`, and what `events` does.
    """
    choices = [_Reader(index, stream) for index, stream in enumerate(streams)]
    async with aclosing(events):
        async for event in events:
            yield await _read(choices, event)
    if not all(choice.has_ended for choice in choices):
        raise StreamError("the stream ended before all choices did")


class _Reader:
    """One choice: what reads it, and how far it is. Of what it has read it keeps nothing."""

    def __init__(self, index: int, stream: AnswerStream) -> None:
        self._index = index
        self._stream = stream
        self._count = 0
        self.has_ended = False

    async def add(self, delta: GenerateResponse.Delta) -> ChoiceDelta:
        new = Choice()
        new.add(delta)
        self._check(is_right=not self.has_ended, event=delta)
        self._count += len(new.token_ids)
        if len(new.token_ids) < LONG_DELTA:
            parts = self._stream.push(new.token_ids)
        else:
            parts = await asyncio.to_thread(self._stream.push, new.token_ids)
        return ChoiceDelta(self._index, new.token_ids, new.logprobs, new.top_logprobs, parts)

    async def finish(self, event: FinishedEvent) -> ChoiceDelta:
        self._check(is_right=not self.has_ended and event.token_count == self._count, event=event)
        self.has_ended = True
        # It reads the whole completion.
        parts = await asyncio.to_thread(self._stream.finish, event)
        return ChoiceDelta(self._index, parts=parts, finished=event)

    def _check(self, *, is_right: bool, event: object) -> None:
        if not is_right:
            raise StreamError(f"a choice of {self._count} tokens, ended={self.has_ended}, got {event}")


async def _read(choices: Sequence[_Reader], event: GenerateResponse) -> ChoiceDelta:
    kind = event.WhichOneof("event")
    if kind not in ("delta", "finished"):
        raise StreamError(f"an event {kind!r} after a call's first one")
    index = event.delta.choice if kind == "delta" else event.finished.choice
    if index >= len(choices):
        raise StreamError(f"an event of choice {index}, where {len(choices)} were asked for")
    return await (choices[index].add(event.delta) if kind == "delta" else choices[index].finish(event.finished))
