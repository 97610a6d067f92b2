"""What a turn costs as a conversation grows.

    python -m bench.turns [--conversations 16] [--turns 128] [--out out/bench]

Conversations through bridge and sidecar, each on a tape of its own, all at once and turn by turn, on the stand-in for
vLLM's core. Every answer must continue the one before. Of each turn: CPU time of bridge and sidecar, bytes of HTTP, and
bytes of gRPC, counted by a relay between the two. Writes OUT/turns.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from bench import on_stand_in
from bench.http_clients import WORDS
from bench.servers import Server, bridge_to

from tokentape.channel import dial
from tokentape.v1 import tape_pb2_grpc

_SHOWN_TURNS = (2, 16, 64, 128)
_JSON = {"Content-Type": "application/json"}
_SETTLE_SECONDS = 0.2


@dataclass
class Turn:
    """One turn of one conversation, on the average of all."""

    turn: int
    history_tokens: float = 0.0
    bridge_cpu_ms: float = 0.0
    sidecar_cpu_ms: float = 0.0
    grpc_bytes_to_sidecar: float = 0.0
    grpc_bytes_from_sidecar: float = 0.0
    http_bytes: float = 0.0


class Relay:
    """Passes bytes between a bridge and a sidecar, and counts them."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.forward = 0
        self.back = 0

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"{host}:{port}"
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(self._host, self._port)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pump(reader, their_writer, True), self._pump(their_reader, writer, False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forward: bool) -> None:
        while data := await reader.read(65536):
            if forward:
                self.forward += len(data)
            else:
                self.back += len(data)
            writer.write(data)
        writer.close()


class Conversation:
    """A client that sends the whole history with every turn, as OpenAI's clients do."""

    def __init__(self, client: httpx.AsyncClient, tape_id: str, seed: int, new_tokens: int) -> None:
        self._client = client
        self._tape_id = tape_id
        self._words = random.Random(seed)
        self._new_tokens = new_tokens
        self._messages: list[dict[str, str]] = []
        self._call_id = ""

    async def turn(self) -> tuple[int, int]:
        """Take a turn; return the tokens of its prompt, and the bytes that went and came over HTTP."""
        self._messages.append({"role": "user", "content": " ".join(self._words.choices(WORDS, k=12))})
        body = {
            "model": "bench",
            "messages": self._messages,
            "max_tokens": self._new_tokens,
            "ignore_eos": True,
            "logprobs": True,
            "metadata": {"tape_id": self._tape_id},
        }
        content = json.dumps(body).encode()
        answer = await self._client.post("/v1/chat/completions", content=content, headers=_JSON)
        if answer.status_code != 200:
            raise RuntimeError(answer.text[:500])
        said = answer.json()
        extension = said["tokentape"]
        if (extension.get("parent_call_id") or "") != self._call_id:
            raise RuntimeError(f"not a continuation of the call before: {extension}")
        self._call_id = extension["call_id"]
        self._messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
        return said["usage"]["prompt_tokens"], len(content) + len(answer.content)


async def converse(options: argparse.Namespace, sidecar: Server) -> list[Turn]:
    relay = Relay(sidecar.address)
    async with relay.serve() as address, dial(sidecar.address) as channel:
        tape_ids = await on_stand_in.open_tapes(tape_pb2_grpc.TapeServiceStub(channel), options.conversations)
        starting = bridge_to(address, name="turns-bridge", out=options.out)
        bridge = await asyncio.to_thread(starting.__enter__)
        try:
            async with httpx.AsyncClient(base_url=f"http://{bridge.address}", timeout=120) as client:
                conversations = [
                    Conversation(client, tape_id, seed, options.tokens) for seed, tape_id in enumerate(tape_ids)
                ]
                return [
                    await one_turn(turn, conversations, (bridge, sidecar), relay)
                    for turn in range(1, options.turns + 1)
                ]
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


async def one_turn(turn: int, conversations: list[Conversation], servers: tuple[Server, Server], relay: Relay) -> Turn:
    bridge, sidecar = servers
    before = bridge.cpu_seconds(), sidecar.cpu_seconds(), relay.forward, relay.back
    read = await asyncio.gather(*(conversation.turn() for conversation in conversations))
    # What the servers do after their answers is part of the turn.
    await asyncio.sleep(_SETTLE_SECONDS)
    after = bridge.cpu_seconds(), sidecar.cpu_seconds(), relay.forward, relay.back
    count = len(conversations)
    bridge_s, sidecar_s, forward, back = ((b - a) / count for a, b in zip(before, after, strict=True))
    return Turn(
        turn,
        history_tokens=sum(tokens for tokens, _ in read) / count,
        bridge_cpu_ms=bridge_s * 1e3,
        sidecar_cpu_ms=sidecar_s * 1e3,
        grpc_bytes_to_sidecar=forward,
        grpc_bytes_from_sidecar=back,
        http_bytes=sum(size for _, size in read) / count,
    )


async def measured(options: argparse.Namespace, sidecar: Server) -> dict[str, Any]:
    turns = await converse(options, sidecar)
    print("\n".join(str(turn) for turn in turns if turn.turn in _SHOWN_TURNS), flush=True)
    return {
        "turns": [asdict(turn) for turn in turns],
        "shown_turns": _SHOWN_TURNS,
        "conversations": options.conversations,
    }


def main() -> None:
    parser = on_stand_in.parser("turns", __doc__)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24, help="sampled in a turn")
    options = parser.parse_args()
    on_stand_in.measure("turns", options, lambda sidecar: measured(options, sidecar))


if __name__ == "__main__":
    main()
