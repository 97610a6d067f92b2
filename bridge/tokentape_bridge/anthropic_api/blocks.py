"""What the model says, as content blocks: the events of a stream, and the blocks that these make.

Blocks come in the order of the answer's parts: reasoning is a `thinking` block, content a `text` block, a tool call a
`tool_use` block. Reasoning and content that are empty make none. A call's arguments are the model's own text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from anthropic.types import (
    InputJSONDelta,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

from tokentape_bridge.answer_parser import Content, Part, Reasoning
from tokentape_bridge.responses import Json
from tokentape_bridge.tool_calls import ToolCall

BlockEvent = RawContentBlockStartEvent | RawContentBlockDeltaEvent | RawContentBlockStopEvent

SIGNATURE = "tokentape"
"""The signature of every thinking block. Nothing is verified by it, but some clients leave out blocks without one."""

_EMPTY = {
    "thinking": ThinkingBlock(type="thinking", thinking="", signature=""),
    "text": TextBlock(type="text", text=""),
}


def _text_delta(text: str) -> TextDelta:
    return TextDelta(type="text_delta", text=text)


def _thinking_delta(text: str) -> ThinkingDelta:
    return ThinkingDelta(type="thinking_delta", thinking=text)


_DELTAS = {"thinking": _thinking_delta, "text": _text_delta}


class Blocks:
    """Makes the events of one answer's blocks."""

    def __init__(self, call_id: str, *, one_call_at_most: bool) -> None:
        """`call_id` makes the ids of tool calls unique.

        `one_call_at_most`: whether calls after the first are dropped.
        """
        self._call_id = call_id
        self._one_call_at_most = one_call_at_most
        self._index = -1
        self._open = ""
        """The type of the block that is open; empty: none is."""
        self.call_count = 0

    def add(self, parts: Iterable[Part]) -> Iterator[BlockEvent]:
        """Yield the events for the next parts."""
        for part in parts:
            match part:
                case Reasoning(text):
                    yield from self._extend("thinking", text)
                case Content(text):
                    yield from self._extend("text", text)
                case ToolCall():
                    yield from self._call(part)

    def close(self) -> Iterator[BlockEvent]:
        """Yield the events that end the block that is open, if one is."""
        if self._open == "thinking":
            yield self._delta(SignatureDelta(type="signature_delta", signature=SIGNATURE))
        if self._open:
            yield RawContentBlockStopEvent(type="content_block_stop", index=self._index)
        self._open = ""

    def _extend(self, kind: str, text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open != kind:
            yield from self.close()
            yield self._start(_EMPTY[kind])
            self._open = kind
        yield self._delta(_DELTAS[kind](text))

    def _call(self, call: ToolCall) -> Iterator[BlockEvent]:
        if self._one_call_at_most and self.call_count:
            return
        yield from self.close()
        name = f"toolu_{self._call_id}-{self.call_count}"
        yield self._start(ToolUseBlock(type="tool_use", id=name, name=call.name, input={}))
        yield self._delta(InputJSONDelta(type="input_json_delta", partial_json=call.arguments_text))
        yield RawContentBlockStopEvent(type="content_block_stop", index=self._index)
        self.call_count += 1

    def _start(self, block: ThinkingBlock | TextBlock | ToolUseBlock) -> BlockEvent:
        self._index += 1
        return RawContentBlockStartEvent(type="content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Any) -> BlockEvent:
        return RawContentBlockDeltaEvent(type="content_block_delta", index=self._index, delta=delta)


def accumulated(events: Iterable[BlockEvent]) -> list[Json]:
    """Return the blocks that `events` make. A call's input is the model's own JSON text, as `msgspec.Raw`.

    Where Python reads as JSON what is none (NaN, Infinity), it is null.
    """
    blocks: list[Json] = []
    for event in events:
        if isinstance(event, RawContentBlockStartEvent):
            blocks.append(event.content_block.to_dict())
        elif isinstance(event, RawContentBlockDeltaEvent):
            _add(blocks[event.index], event.delta)
    return blocks


def _add(block: Json, delta: object) -> None:
    match delta:
        case TextDelta(text=text):
            block["text"] += text
        case ThinkingDelta(thinking=text):
            block["thinking"] += text
        case SignatureDelta(signature=signature):
            block["signature"] = signature
        case InputJSONDelta(partial_json=text):
            block["input"] = _as_json(text)
        case _:
            raise TypeError(f"a delta of no block of ours: {delta}")


def _as_json(text: str) -> msgspec.Raw:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return msgspec.Raw(msgspec.json.encode(json.loads(text)))
    return msgspec.Raw(text.encode())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
