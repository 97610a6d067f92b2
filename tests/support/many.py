"""`GenerateMany` for tests: its messages taken apart, strictly in the order that the contract promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import repeat
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from support.sidecar_client import Generated, SidecarClient
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateManyResponse, GenerateRequest, GenerateResponse
from tokentape.v1.types_pb2 import TopLogprobs

OK = (0, "")


class Calls:
    """What is known of each call, by key. A key has one call here."""

    def __init__(self) -> None:
        self.generated: dict[int, Generated] = {}
        self.ended: dict[int, tuple[int, str]] = {}
        """By key, code and message."""
        self.message_count = 0

    def take(self, message: GenerateManyResponse) -> None:
        """Take the next message."""
        self.message_count += 1
        for started in message.started:
            assert started.key not in self.generated
            self.generated[started.key] = Generated()
            self._event(started.key, GenerateResponse(started=started.started))
        for key, delta in deltas_of(message):
            self._event(key, GenerateResponse(delta=delta))
        for finished in message.finished:
            self._event(finished.key, GenerateResponse(finished=finished.completion))
        for ended in message.ended:
            assert ended.key not in self.ended, "a call ended twice"
            self.ended[ended.key] = ended.code, ended.message

    def check_refused(self, key: int, status: grpc.StatusCode, words: str) -> None:
        """Assert that a call ended with a status whose message has these words."""
        code, message = self.ended[key]
        assert (code, words in message) == (code_of(status), True), message

    def _event(self, key: int, event: GenerateResponse) -> None:
        assert key not in self.ended, "more of a call that has ended"
        self.generated[key].take(event)


def deltas_of(message: GenerateManyResponse) -> Iterable[tuple[int, GenerateResponse.Delta]]:
    """Yield the runs of a message as `Generate` would send them, each with its key."""
    runs, tokens, k = len(message.keys), len(message.token_ids), message.top_logprobs.k
    counts: Sequence[int] = message.token_counts or [1] * runs
    assert len(message.choices) in (0, runs)
    assert len(counts) == runs
    assert sum(counts) == tokens == len(message.logprobs)
    assert message.HasField("top_logprobs") == (k > 0)
    assert len(message.top_logprobs.token_ids) == len(message.top_logprobs.logprobs) == k * tokens
    start = 0
    for key, choice, count in zip(message.keys, message.choices or repeat(0), counts, strict=False):
        end = start + count
        yield (
            key,
            GenerateResponse.Delta(
                choice=choice,
                token_ids=message.token_ids[start:end],
                logprobs=message.logprobs[start:end],
                weight_version=message.weight_version,
                top_logprobs=TopLogprobs(
                    k=k,
                    token_ids=message.top_logprobs.token_ids[start * k : end * k],
                    logprobs=message.top_logprobs.logprobs[start * k : end * k],
                )
                if k
                else None,
            ),
        )
        start = end


def begin(
    key: int, prompt: Iterable[int] = (1, 2, 3), *, timeout: float | None = None, metadata: Any = None, **request: Any
) -> GenerateManyRequest:
    """A message that begins a call."""
    limit = None if timeout is None else Duration(seconds=int(timeout), nanos=round(timeout % 1 * 1e9))
    given = GenerateRequest(prompt_token_ids=prompt, **request)
    return GenerateManyRequest(
        begin=[GenerateManyRequest.Begin(key=key, request=given, timeout=limit, metadata=metadata)]
    )


def leave(*keys: int) -> GenerateManyRequest:
    """A message that leaves calls."""
    return GenerateManyRequest(leave=keys)


class Stream:
    """A `GenerateMany` stream of a test, read in the background from the start."""

    def __init__(self, client: SidecarClient) -> None:
        self.calls = Calls()
        self.stream: Any = client.generation.GenerateMany(aiter(self._requests()))
        self._sent = asyncio.Queue[GenerateManyRequest | None]()
        self._reading = asyncio.create_task(self._read())

    def send(self, *requests: GenerateManyRequest) -> None:
        """Send messages."""
        for request in requests:
            self._sent.put_nowait(request)

    async def rest(self) -> Calls:
        """Close our side, and return what has been told when the stream has ended. Raises its status."""
        self._sent.put_nowait(None)
        return await self.ended()

    async def ended(self) -> Calls:
        """Return what has been told when the stream has ended by itself. Raises its status."""
        await self._reading
        return self.calls

    async def leave(self) -> None:
        """Cancel the stream."""
        self.stream.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _requests(self) -> AsyncIterator[GenerateManyRequest]:
        while (request := await self._sent.get()) is not None:
            yield request

    async def _read(self) -> None:
        async for message in self.stream:
            self.calls.take(message)


def code_of(status: grpc.StatusCode) -> int:
    """Return a status's number."""
    code: int = status.value[0]
    return code
