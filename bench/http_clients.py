"""Clients of HTTP servers; each reads its connection's bytes itself."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from bench.readings import Load, Readings

WORDS = ("time", "water", "under", "light", "house", "river", "number", "people", "sound", "great", "place", "year")
"""What chats are made of."""


class HttpClient:
    """HTTP/1.1 over a connection that it keeps, as plain as can be: what is measured is the server."""

    path = "/v1/completions"
    streamed = True

    def __init__(self, load: Load, shared: None) -> None:
        del shared
        host, _, port = load.address.rpartition(":")
        self._host, self._port = host, int(port)
        self.load = load
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @staticmethod
    def shared(load: Load) -> None:
        """Each has a connection of its own."""

    async def request(self, prompt: list[int], readings: Readings) -> None:
        body = json.dumps({**self.body(prompt), "stream": self.streamed}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**24)
        sent = time.monotonic()
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await (self._read_stream if self.streamed else self._read_whole)(sent, readings)

    def body(self, prompt: list[int]) -> dict[str, Any]:
        return {**self.common(), "prompt": prompt, "logprobs": 0}

    def common(self) -> dict[str, Any]:
        tokens = self.load.new_tokens
        return {"model": self.load.model, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}

    def count(self, answer: Any) -> int:
        """Return how many tokens an answer, or a chunk of one, has log-probabilities for."""
        return sum(len(c["logprobs"]["token_logprobs"]) for c in answer["choices"] if c.get("logprobs"))

    async def _head(self) -> dict[str, str]:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if status.split()[1] != "200":
            raise RuntimeError(f"{self.path}: {status} {await self._reader.read(2000)!r}")
        return headers

    async def _read_whole(self, sent: float, readings: Readings) -> None:
        assert self._reader is not None
        headers = await self._head()
        if "content-length" in headers:
            body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            body = b"".join([chunk async for chunk in self._chunks()])
        arrived = time.monotonic()
        readings.request(self.path, sent, [arrived], self.count(msgspec.json.decode(body)), self.load.new_tokens)

    async def _read_stream(self, sent: float, readings: Readings) -> None:
        await self._head()
        arrivals: list[float] = []
        tokens, rest = 0, b""
        async for chunk in self._chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            now = time.monotonic()
            counted = sum(
                self.count(msgspec.json.decode(event[6:]))
                for event in events
                if event.startswith(b"data: ") and event != b"data: [DONE]"
            )
            if counted:
                arrivals.append(now)
                tokens += counted
        readings.request(self.path, sent, arrivals, tokens, self.load.new_tokens)

    async def _chunks(self) -> AsyncGenerator[bytes]:
        reader = self._reader
        assert reader is not None
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)


class WholeCompletions(HttpClient):
    streamed = False


class ChatClient(HttpClient):
    """Chat, whose prompt is text; ids and log-probabilities of the answer."""

    path = "/v1/chat/completions"

    def body(self, prompt: list[int]) -> dict[str, Any]:
        # A word for a token, more or less.
        text = " ".join(random.Random(prompt[0]).choices(WORDS, k=len(prompt)))
        messages = [{"role": "user", "content": f"{prompt[1]} {text}"}]
        return {**self.common(), "messages": messages, "logprobs": True, "return_token_ids": True}

    def count(self, answer: Any) -> int:
        return sum(len(c["logprobs"]["content"]) for c in answer["choices"] if c.get("logprobs"))


class WholeChat(ChatClient):
    streamed = False


class TokensClient(HttpClient):
    """vLLM's own endpoint for token ids in and out."""

    path = "/inference/v1/generate"

    def body(self, prompt: list[int]) -> dict[str, Any]:
        params = {key: value for key, value in self.common().items() if key != "model"}
        return {"model": self.load.model, "token_ids": prompt, "sampling_params": {**params, "logprobs": 0}}

    def count(self, answer: Any) -> int:
        return sum(len(c["logprobs"]["content"]) for c in answer["choices"] if c.get("logprobs"))


class WholeTokens(TokensClient):
    streamed = False
