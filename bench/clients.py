"""Clients that read completions from a server as fast as they can, in processes of their own.

Every request asks for a given number of tokens with the log-probability of each, and every answer is checked to have
just that: a server that drops or repeats a token gives no figure. `run` spreads the load over processes, so that the
client is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec
import numpy as np

_PROMPT_IDS = range(1000, 40_000)
_SETTLE_SECONDS = 0.3
_TCP_INFO_BYTES_RECEIVED = struct.Struct("=128xQ")


@dataclass(frozen=True)
class Load:
    """What to ask: `streams` at once, each `rounds` times."""

    kind: str
    """One of `CLIENTS`."""
    address: str
    streams: int
    rounds: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 256
    model: str = "bench"
    processes: int = 1
    site: str = ""
    """A directory with packages that this client needs besides."""
    give_up_seconds: float = 240.0


@dataclass
class Readings:
    """What clients saw; times in seconds of the machine's monotonic clock."""

    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    bytes_received: int = 0
    first: list[float] = field(default_factory=list)
    """From sending the request to its first token, for each."""
    gaps: list[float] = field(default_factory=list)
    """Between one arrival of tokens and the next of the same request."""
    messages: int = 0

    def request(self, sent: float, arrivals: list[float], tokens: int) -> None:
        """Take one request's arrivals."""
        self.tokens += tokens
        self.messages += len(arrivals)
        self.first.append(arrivals[0] - sent)
        self.gaps.extend(np.diff(arrivals).tolist())

    def figures(self) -> dict[str, float]:
        """Return the readings as a row of a table has them."""
        seconds = self.ended - self.began
        milliseconds = 1e3
        gaps = self.gaps or [0.0]
        return {
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "first_token_ms_p50": float(np.percentile(self.first, 50)) * milliseconds,
            "first_token_ms_p99": float(np.percentile(self.first, 99)) * milliseconds,
            "gap_ms_p50": float(np.percentile(gaps, 50)) * milliseconds,
            "gap_ms_p99": float(np.percentile(gaps, 99)) * milliseconds,
            "bytes_per_token": self.bytes_received / self.tokens,
            "tokens_per_message": self.tokens / self.messages,
        }

    @classmethod
    def joined(cls, parts: list[Readings]) -> Readings:
        """Return the readings of all processes as one."""
        return cls(
            began=min(part.began for part in parts),
            ended=max(part.ended for part in parts),
            tokens=sum(part.tokens for part in parts),
            bytes_received=sum(part.bytes_received for part in parts),
            first=[value for part in parts for value in part.first],
            gaps=[value for part in parts for value in part.gaps],
            messages=sum(part.messages for part in parts),
        )


class Client(Protocol):
    """One stream after the other, over a connection of its own or a shared one."""

    async def request(self, prompt: list[int], readings: Readings) -> None:
        """Ask once, and read the answer to its end."""
        ...


class HttpClient:
    """HTTP/1.1 over a connection that it keeps, as plain as can be: what is measured is the server."""

    path = "/v1/completions"
    streamed = True

    def __init__(self, load: Load, _shared: object) -> None:
        host, _, port = load.address.rpartition(":")
        self._host, self._port = host, int(port)
        self.load = load
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

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
        self._take(sent, [time.monotonic()], self.count(msgspec.json.decode(body)), readings)

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
        self._take(sent, arrivals, tokens, readings)

    async def _chunks(self) -> Any:
        reader = self._reader
        assert reader is not None
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)

    def _take(self, sent: float, arrivals: list[float], tokens: int, readings: Readings) -> None:
        if tokens != self.load.new_tokens:
            raise RuntimeError(f"{self.path}: {tokens} tokens with log-probabilities of {self.load.new_tokens}")
        readings.request(sent, arrivals, tokens)


class WholeCompletions(HttpClient):
    streamed = False


class ChatClient(HttpClient):
    """Chat, whose prompt is text; ids and log-probabilities of the answer."""

    path = "/v1/chat/completions"

    def body(self, prompt: list[int]) -> dict[str, Any]:
        # A word for a token, more or less.
        text = " ".join(random.Random(prompt[0]).choices(_WORDS, k=len(prompt)))
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


class GenerateClient:
    """Our gRPC, all streams of a process over one connection."""

    def __init__(self, load: Load, channel: Any) -> None:
        from tokentape.v1 import generation_pb2_grpc  # noqa: PLC0415 - peers' environments have it not

        self._load = load
        self._generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate

    @staticmethod
    def shared(load: Load) -> Any:
        from tokentape.channel import dial  # noqa: PLC0415

        return dial(load.address)

    async def request(self, prompt: list[int], readings: Readings) -> None:
        from tokentape.v1 import generation_pb2, types_pb2  # noqa: PLC0415

        sampling = types_pb2.SamplingParameters(max_tokens=self._load.new_tokens, ignore_eos=True, temperature=1.0)
        request = generation_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
        arrivals: list[float] = []
        tokens, sent = 0, time.monotonic()
        async for response in self._generate(request):
            delta = response.delta
            if delta.token_ids:
                arrivals.append(time.monotonic())
                tokens += len(delta.logprobs)
        if tokens != self._load.new_tokens:
            raise RuntimeError(f"Generate: {tokens} tokens of {self._load.new_tokens}")
        readings.request(sent, arrivals, tokens)


class SmgClient:
    """smg-grpc-servicer's gRPC, likewise."""

    streamed = True

    def __init__(self, load: Load, channel: Any) -> None:
        from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc  # noqa: PLC0415 - only in `site`

        self._load = load
        self._messages = vllm_engine_pb2
        self._generate = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate

    @staticmethod
    def shared(load: Load) -> Any:
        from tokentape.channel import dial  # noqa: PLC0415

        return dial(load.address)

    async def request(self, prompt: list[int], readings: Readings) -> None:
        of = self._messages
        sampling = of.SamplingParams(
            max_tokens=self._load.new_tokens, ignore_eos=True, temperature=1.0, top_p=1.0, logprobs=0, n=1
        )
        request = of.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized=of.TokenizedInput(input_ids=prompt),
            sampling_params=sampling,
            stream=self.streamed,
        )
        arrivals: list[float] = []
        tokens, sent = 0, time.monotonic()
        async for response in self._generate(request):
            part = response.chunk if self.streamed else response.complete
            # Streamed, the last message repeats the last of the others.
            if part.output_logprobs.token_logprobs:
                arrivals.append(time.monotonic())
                tokens += len(part.output_logprobs.token_logprobs)
        if tokens != self._load.new_tokens:
            raise RuntimeError(f"smg's Generate: {tokens} tokens of {self._load.new_tokens}")
        readings.request(sent, arrivals, tokens)


class WholeSmg(SmgClient):
    streamed = False


CLIENTS: dict[str, Callable[[Load, Any], Client]] = {
    "generate": GenerateClient,
    "completions": HttpClient,
    "completions, whole": WholeCompletions,
    "chat": ChatClient,
    "chat, whole": WholeChat,
    "tokens": TokensClient,
    "tokens, whole": WholeTokens,
    "smg": SmgClient,
    "smg, whole": WholeSmg,
}

_WORDS = ("time", "water", "under", "light", "house", "river", "number", "people", "sound", "great", "place", "year")


def run(load: Load) -> Readings:
    """Put `load` on the server at its address and return what its processes saw. Raises what a client raised first."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(min(load.processes, load.streams)):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_process, args=(load, index, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for pipe in pipes:
            _receive(pipe, load.give_up_seconds)
        go_at = time.monotonic() + _SETTLE_SECONDS
        for pipe in pipes:
            pipe.send(go_at)
        return Readings.joined([_receive(pipe, load.give_up_seconds) for pipe in pipes])
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a client has said nothing for {seconds:.0f} s")
    said = pipe.recv()
    if isinstance(said, str):
        raise RuntimeError(said)
    return said


def _process(load: Load, index: int, pipe: Connection) -> None:
    try:
        pipe.send(asyncio.run(_clients(load, index, pipe)))
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        pipe.send(f"client {index}: {type(error).__name__}: {error}")


async def _clients(load: Load, index: int, pipe: Connection) -> Readings:
    if load.site:
        sys.path.append(load.site)
    make = CLIENTS[load.kind]
    shared = make.shared(load) if hasattr(make, "shared") else None
    streams = len(range(index, load.streams, load.processes))
    clients = [make(load, shared) for _ in range(streams)]
    # Another prompt for every request that the machine ever sees: no server has it in its cache.
    ids = random.Random(f"{os.getpid()}-{time.monotonic_ns()}")
    prompts = [[ids.choices(_PROMPT_IDS, k=load.prompt_tokens) for _ in range(load.rounds)] for _ in clients]
    pipe.send(None)
    go_at = pipe.recv()
    await asyncio.sleep(go_at - time.monotonic())
    readings = Readings(began=go_at)
    async with asyncio.TaskGroup() as tasks:
        for client, own in zip(clients, prompts, strict=True):
            tasks.create_task(_stream(client, own, readings))
    readings.ended = time.monotonic()
    readings.bytes_received = _bytes_received(load.address)
    return readings


async def _stream(client: Client, prompts: list[list[int]], readings: Readings) -> None:
    for prompt in prompts:
        await client.request(prompt, readings)


def _bytes_received(address: str) -> int:
    """Return what this process's connections to `address` have received, as the system counts it."""
    port, total = int(address.rpartition(":")[2]), 0
    for name in os.listdir("/proc/self/fd"):
        if not _is_socket(name):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += _TCP_INFO_BYTES_RECEIVED.unpack_from(info)[0]
    return total


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False
