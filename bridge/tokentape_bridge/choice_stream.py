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

from tokentape.choice_columns import TokenRun
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape.v1.types_pb2 import Completion as FinishedEvent
from tokentape_bridge.answer_parser import Content, Part, Reasoning
from tokentape_bridge.answer_stream import AnswerStream
from tokentape_bridge.completion import CallEvent, StreamError, by_position
from tokentape_bridge.tool_calls import ToolCall

LONG_DELTA = 256
"""From how many tokens on work on a delta, or on an opening that tells prompts as text, is done in a thread: others
would wait for it."""


_LONG_COMPLETION = 2 * LONG_DELTA
"""The same, for the end of a completion of so many tokens. Twice as many, since its text is all that is made: most of
the work on a delta is the JSON of its log-probabilities."""


@dataclass(slots=True)
class ChoiceDelta:
    """What one event adds to a choice. `token_ids`, `logprobs` and `top_logprobs` run in parallel.

    Not frozen: there is one for each event of each stream, and a frozen one takes three times as long to make.
    """

    index: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """Per token the most probable ones as (id, log-probability), best first; empty when none were asked for."""
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
    events: AsyncGenerator[CallEvent], streams: Sequence[AnswerStream]
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

    async def add(self, run: TokenRun) -> ChoiceDelta:
        token_ids, logprobs = list(run.token_ids), list(run.logprobs)
        count = len(token_ids)
        if self.has_ended or len(logprobs) != count:
            raise self._error(run)
        self._count += count
        if count < LONG_DELTA:
            parts = self._stream.push(token_ids)
        else:
            parts = await asyncio.to_thread(self._stream.push, token_ids)
        return ChoiceDelta(self._index, token_ids, logprobs, by_position(run.top, count), parts)

    async def finish(self, event: FinishedEvent) -> ChoiceDelta:
        if self.has_ended or event.token_count != self._count:
            raise self._error(event)
        self.has_ended = True
        # It reads the whole completion.
        if self._count < _LONG_COMPLETION:
            parts = self._stream.finish(event)
        else:
            parts = await asyncio.to_thread(self._stream.finish, event)
        return ChoiceDelta(self._index, parts=parts, finished=event)

    def _error(self, event: object) -> StreamError:
        return StreamError(f"a choice of {self._count} tokens, ended={self.has_ended}, got {event}")


async def _read(choices: Sequence[_Reader], event: CallEvent) -> ChoiceDelta:
    if isinstance(event, GenerateResponse.Started):
        raise StreamError("a call began twice")
    if event.choice >= len(choices):
        raise StreamError(f"an event of choice {event.choice}, where {len(choices)} were asked for")
    reader = choices[event.choice]
    return await (reader.add(event) if isinstance(event, TokenRun) else reader.finish(event))
