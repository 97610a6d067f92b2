"""Putting a streamed message together again, as Anthropic's client does, and what a chat says of the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

Json = dict[str, Any]

_events: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def events_of(stream: str) -> list[Json]:
    """Return the events of a stream, whose frames must name them; comments are left out."""
    assert stream.isascii()
    assert stream.endswith("\n\n")
    frames = [frame.split("\n") for frame in stream.removesuffix("\n\n").split("\n\n") if not frame.startswith(":")]
    assert all(len(frame) == 2 for frame in frames)
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [event["type"] for event in events] == [name.removeprefix("event: ") for name, _ in frames]
    return events


def assembled(events: Sequence[Json]) -> Json:
    """Return the unstreamed body that a stream's events stand for; they must be a well-formed stream."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    _check_blocks(events[2:-2])
    snapshot: Any = None
    json_bufs: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            typed = _events.validate_python(event)
            snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=json_bufs)
    return snapshot.to_dict()


def _check_blocks(events: Sequence[Json]) -> None:
    """One block after the other: its start, its deltas, its stop."""
    for index, (_, group) in enumerate(itertools.groupby(events, lambda event: event["index"])):
        block = list(group)
        assert {event["index"] for event in block} == {index}
        kinds = [event["type"] for event in block]
        assert kinds[:1] + kinds[-1:] == ["content_block_start", "content_block_stop"]
        assert set(kinds[1:-1]) == {"content_block_delta"}


def comparable(message: Json) -> Json:
    """Return a message without what differs between two calls."""
    blocks = [{**block, "id": ""} if block["type"] == "tool_use" else block for block in message["content"]]
    told = {key: value for key, value in message["tokentape"].items() if key not in ("call_id", "tape_id")}
    return message | {"id": "", "content": blocks, "tokentape": told}


def as_chat_message(message: Json) -> Json:
    """Return what a chat's assistant message says that has the same blocks; empty things are left out."""

    def texts(kind: str) -> str:
        return "".join(block[kind] for block in message["content"] if block["type"] == kind)

    calls = [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
    return _without_empty(content=texts("text"), reasoning=texts("thinking"), calls=calls)


def what_chat_says(message: Json) -> Json:
    """Return the same of a chat's message."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return _without_empty(content=message["content"], reasoning=message.get("reasoning_content"), calls=calls)


def _without_empty(**fields: object) -> Json:
    return {key: value for key, value in fields.items() if value}
