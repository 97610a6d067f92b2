"""Server-sent events: frames that every reader cuts at the same places, and a response that waits for its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from support.waiting import eventually
from tokentape_bridge.anthropic_api.serving import PING_FRAME
from tokentape_bridge.errors import ApiError
from tokentape_bridge.sse import DONE, EventStreamResponse, data_frame, error_frame

SEPARATORS = "a\u2028b\u0085c\r\nd \N{HOT PEPPER}"
SCOPE: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}}


def test_frames_are_ascii_and_one_line_C11() -> None:
    frame = data_frame({"text": SEPARATORS})
    assert frame.isascii()
    assert frame.endswith(b"\n\n")
    # However a reader splits lines.
    for lines in (frame.decode().splitlines(), frame.decode("latin-1").splitlines(), frame.decode().split("\n")[:2]):
        assert len(lines) == 2
        assert json.loads(lines[0].removeprefix("data: ")) == {"text": SEPARATORS}
    [decoded] = list(httpx_sse(data_frame({"text": SEPARATORS}, "delta")))
    assert decoded == ("delta", {"text": SEPARATORS})


def httpx_sse(data: bytes) -> list[tuple[str, Any]]:
    """The events as openai's client reads them."""
    from openai._streaming import SSEDecoder  # noqa: PLC0415 - private, and only here

    return [(event.event or "", event.json()) for event in SSEDecoder().iter_bytes(iter([data]))]


def test_a_fault_is_a_frame_in_the_errors_shape_C04() -> None:
    [(_, body)] = httpx_sse(error_frame(ApiError("gone", code="sidecar_unavailable", status=503, error_type="x")))
    assert body == {"error": {"message": "gone", "type": "x", "param": None, "code": "sidecar_unavailable"}}
    [(_, body)] = httpx_sse(error_frame(ValueError("a secret")))
    assert body["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(body)


class Frames:
    """Some frames, how many were asked for, and whether it was closed."""

    def __init__(self, count: int, *, pause: float = 0.0) -> None:
        self._count = count
        self._pause = pause
        self.taken = 0
        self.closed = asyncio.Event()

    async def stream(self) -> AsyncGenerator[bytes]:
        try:
            for number in range(self._count):
                await asyncio.sleep(self._pause)
                self.taken += 1
                yield data_frame({"n": number})
        finally:
            self.closed.set()


class Client:
    """A client that takes what is sent while it is not `blocked`, and leaves when told so."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.leaves = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.takes.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_frames_arrive_in_order_with_their_headers() -> None:
    client, frames = Client(), Frames(3)
    await EventStreamResponse(frames.stream(), headers={"x-call-id": "c"})(SCOPE, client.receive, client.send)
    assert client.body == b"".join(data_frame({"n": number}) for number in range(3))
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"x-call-id"] == b"c"
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert frames.closed.is_set()


async def test_a_slow_client_makes_the_source_wait_D13() -> None:
    client, frames = Client(), Frames(1000)
    client.takes.clear()
    answering = asyncio.create_task(EventStreamResponse(frames.stream())(SCOPE, client.receive, client.send))
    for _ in range(200):
        await asyncio.sleep(0)
    assert frames.taken <= 1
    client.takes.set()
    await answering
    assert client.body == b"".join(data_frame({"n": number}) for number in range(1000))


@pytest.mark.parametrize("takes", [True, False], ids=["reading", "blocked"])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "at once"])
async def test_a_client_that_leaves_closes_the_source_at_once_C01(takes: bool, begun: bool) -> None:
    client, frames = Client(), Frames(10**9, pause=0.001)
    stream = frames.stream()
    await anext(stream)
    if not takes:
        client.takes.clear()
    if not begun:
        client.leaves.set()
    answering = asyncio.create_task(EventStreamResponse(stream)(SCOPE, client.receive, client.send))
    if begun:
        await asyncio.sleep(0.02)
        client.leaves.set()
    async with asyncio.timeout(5):
        await answering
    assert frames.closed.is_set()


async def test_comments_fill_a_silence_and_cut_no_frame_C14() -> None:
    client, frames = Client(), Frames(3, pause=0.2)
    response = EventStreamResponse(frames.stream(), keep_alive_seconds=0.03)
    await response(SCOPE, client.receive, client.send)
    assert client.body.count(b": keep-alive\n\n") >= 3
    assert httpx_sse(client.body) == [("", {"n": number}) for number in range(3)]


async def test_nothing_is_sent_after_the_end_however_slowly_the_client_takes_the_last_frame_C14() -> None:
    """A keep-alive waits beside the last frame then, and goes out after it."""
    client, frames = Client(), Frames(2, pause=0.05)
    response = EventStreamResponse(frames.stream(), keep_alive_seconds=0.1)
    answering = asyncio.create_task(response(SCOPE, client.receive, client.send))
    await eventually(lambda: b'"n"' in client.body)
    client.takes.clear()
    await asyncio.sleep(0.3)
    client.takes.set()
    async with asyncio.timeout(5):
        await answering
    ends = [number for number, message in enumerate(client.messages) if message.get("more_body") is False]
    assert ends == [len(client.messages) - 1]
    assert httpx_sse(client.body) == [("", {"n": number}) for number in range(2)]
    assert b": keep-alive" in client.body


async def test_the_messages_api_has_a_frame_of_its_own_for_it() -> None:
    client, frames = Client(), Frames(2, pause=0.2)
    response = EventStreamResponse(frames.stream(), keep_alive=PING_FRAME, keep_alive_seconds=0.03)
    await response(SCOPE, client.receive, client.send)
    events = httpx_sse(client.body)
    assert events.count(("ping", {"type": "ping"})) >= 2
    assert b"keep-alive" not in client.body


async def test_no_comments_while_frames_come() -> None:
    client, frames = Client(), Frames(20, pause=0.01)
    await EventStreamResponse(frames.stream(), keep_alive_seconds=30)(SCOPE, client.receive, client.send)
    assert b"keep-alive" not in client.body


async def test_a_real_client_reads_it_line_by_line_C11() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def frames() -> AsyncGenerator[bytes]:
            yield data_frame({"text": SEPARATORS})
            yield DONE

        await EventStreamResponse(frames())(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bridge") as client:
        response = await client.get("/")
        lines = [line async for line in response.aiter_lines() if line]
    assert [line.startswith("data: ") for line in lines] == [True, True]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": SEPARATORS}


@pytest.mark.parametrize("takes", [True, False], ids=["reading", "blocked"])
async def test_a_bridge_that_stops_ends_a_stream_with_an_error_C04(takes: bool) -> None:
    client, frames = Client(), Frames(10**9, pause=0.001)
    answering = asyncio.create_task(EventStreamResponse(frames.stream())(SCOPE, client.receive, client.send))
    await asyncio.sleep(0.02)
    if not takes:
        client.takes.clear()
        await asyncio.sleep(0.02)
    answering.cancel()
    await frames.closed.wait()
    client.takes.set()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert json.loads(client.body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "bridge_stopping"
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
