"""The client that agents get."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tokentape_executor.rollout_client import RolloutClient

TAPE = "a." + "0" * 32


def connect(url: str = "http://127.0.0.1:8000/v1") -> RolloutClient:
    return RolloutClient.connect(url, tape_id=TAPE, model="toy")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"])
async def test_the_tape_is_in_its_base_url(url: str) -> None:
    async with connect(url) as client:
        assert str(client.base_url) == f"http://127.0.0.1:8000/tapes/{TAPE}/v1/"
        assert (client.tape_id, client.model) == (TAPE, "toy")
        assert isinstance(client, openai.AsyncOpenAI)


async def test_copies_are_of_the_same_tape() -> None:
    async with connect() as client:
        for copy in (client.with_options(max_retries=3), client.copy(timeout=5)):
            assert isinstance(copy, RolloutClient)
            assert (copy.tape_id, copy.model, copy.base_url) == (TAPE, "toy", client.base_url)
        assert client.with_options(max_retries=3).max_retries == 3


async def test_neither_proxies_nor_keys_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.append(await reader.readuntil(b"\r\n\r\n"))
        body = b'{"object": "list", "data": []}'
        head = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-user")
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, connect(f"http://{host}:{port}/v1") as client:
        assert (await client.models.list()).data == []
    (request,) = answers
    assert request.startswith(f"GET /tapes/{TAPE}/v1/models".encode())
    assert b"secret-of-the-user" not in request


async def test_a_failed_call_is_not_made_again_by_itself() -> None:
    calls = 0

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.write(b"HTTP/1.1 503 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, connect(f"http://{host}:{port}/v1") as client:
        with pytest.raises(openai.InternalServerError):
            await client.models.list()
    assert calls == 1
