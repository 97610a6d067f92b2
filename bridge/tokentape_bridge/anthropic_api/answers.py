"""Answers of the Messages API, streamed and not, to one call.

Both are made of the same events, so that they are the same message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from anthropic.types import (
    Message,
    MessageDeltaUsage,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    StopReason,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta

from tokentape.v1 import types_pb2
from tokentape.v1.types_pb2 import Completion
from tokentape_bridge.answer_parser import Content, Part, Reasoning
from tokentape_bridge.anthropic_api.blocks import BlockEvent, Blocks, accumulated
from tokentape_bridge.choice_stream import ChoiceDelta
from tokentape_bridge.responses import Json

PING: Json = {"type": "ping"}
"""The event that says nothing."""


class MessageAnswer:
    """One call's answer."""

    def __init__(
        self, *, call_id: str, model: str, prompt_token_count: int, extension: Json, one_call_at_most: bool
    ) -> None:
        """`model` is the name that the answer gives, `extension` says what became of the call on its tape."""
        self._blocks = Blocks(call_id, one_call_at_most=one_call_at_most)
        self._extension = extension
        self._completion_token_count = 0
        self._message = Message(
            id=f"msg_{call_id}",
            type="message",
            role="assistant",
            model=model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            stop_details=None,
            # None of the prompt's tokens is counted as cached.
            usage=Usage(
                input_tokens=prompt_token_count,
                output_tokens=0,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=0,
            ),
        )

    def opening(self) -> list[Json]:
        """Return a stream's first events."""
        start = RawMessageStartEvent(type="message_start", message=self._message).to_dict()
        return [{**start, "message": self._message.to_dict() | {"tokentape": self._extension}}, PING]

    def events(self, added: ChoiceDelta) -> list[Json]:
        """Return the events for what was added; there may be none."""
        self._completion_token_count += len(added.token_ids)
        events: list[Json] = [event.to_dict() for event in self._blocks.add(added.parts)]
        if added.finished is not None:
            events += [event.to_dict() for event in self._blocks.close()]
            events += self._closing(added.finished)
        return events

    def whole(self, deltas: Iterable[ChoiceDelta]) -> Json:
        """Return the body of the unstreamed answer that consists of all `deltas`."""
        deltas = list(deltas)
        events = self._block_events(deltas)
        finished = deltas[-1].finished
        assert finished is not None, "the last delta says how it ended"
        body: Json = self._message.to_dict() | {"content": accumulated(events), "tokentape": self._extension}
        body["stop_reason"], body["stop_sequence"] = _stop(finished, has_calls=self._blocks.call_count > 0)
        body["usage"]["output_tokens"] = sum(len(added.token_ids) for added in deltas)
        return body

    def _block_events(self, deltas: Iterable[ChoiceDelta]) -> list[BlockEvent]:
        parts = _joined(part for added in deltas for part in added.parts)
        return [*self._blocks.add(parts), *self._blocks.close()]

    def _closing(self, finished: Completion) -> list[Json]:
        reason, sequence = _stop(finished, has_calls=self._blocks.call_count > 0)
        ended = RawMessageDeltaEvent(
            type="message_delta",
            delta=Delta(stop_reason=reason, stop_sequence=sequence, stop_details=None),
            usage=MessageDeltaUsage(output_tokens=self._completion_token_count),
        )
        return [ended.to_dict(), RawMessageStopEvent(type="message_stop").to_dict()]


def _stop(finished: Completion, *, has_calls: bool) -> tuple[StopReason, str | None]:
    """Return `stop_reason` and `stop_sequence`. What ended neither by itself nor by a stop string ended early."""
    if has_calls:
        return "tool_use", None
    if finished.HasField("stop_string"):
        return "stop_sequence", finished.stop_string
    return ("end_turn" if finished.finish_reason == types_pb2.FINISH_REASON_STOP else "max_tokens"), None


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts, those of one kind that follow each other as one."""
    for kind, group in itertools.groupby(parts, type):
        if kind is Reasoning or kind is Content:
            yield kind("".join(part.text for part in group if isinstance(part, Reasoning | Content)))
        else:
            yield from group
