"""Streamed chats through a real bridge process and real, scripted sidecars, as OpenAI's clients see them."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from support.agent import TOOLS
from support.streamed import assembled, comparable
from tokentape.channel import dial
from tokentape.v1.tape_pb2 import GetTapeRequest, OpenTapeRequest, TapeEntry
from tokentape.v1.tape_pb2_grpc import TapeServiceStub
from tokentape.v1.types_pb2 import FINISH_REASON_ABORT

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

Json = dict[str, Any]

IM_END = 2
SEPARATORS = "a\u2028b\u0085c\r\nd \N{HOT PEPPER}"
CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'
ANSWER = f"<think>\nhm \N{HOT PEPPER}\n</think>\n\nI look.\n{CALL}\n{CALL}"
HI: list[Any] = [{"role": "user", "content": "hi"}]
STRICT: list[Any] = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


def script(name: str, *steps: Json) -> Json:
    model = {"name": name, "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [IM_END]}
    return {"model": model, "calls": [{"steps": list(steps)}], "repeat": True}


def steps_of(token_ids: list[int], size: int) -> list[Json]:
    """`token_ids` and the end of the turn, `size` at a time, each with a log-probability of its own."""
    places = list(enumerate([*token_ids, IM_END]))
    pieces = [places[start : start + size] for start in range(0, len(places), size)]
    return [
        {
            "token_ids": [token_id for _, token_id in piece],
            "logprobs": [{str(token_id): -place / 8} for place, token_id in piece],
        }
        for piece in pieces
    ]


@pytest.fixture(scope="module")
def sidecars(start_sidecar: StartSidecar, model_directory: Path) -> dict[str, ServerProcess]:
    """By name, which is that of the model as well; each always gives the same answer."""
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    pieces = [{"token_ids": [token_id], "delay_ms": 50} for token_id in encoded("one two three four")]
    scripts = {
        "calls": steps_of(encoded(ANSWER), 2),
        "text": steps_of(encoded(SEPARATORS), 1),
        "fails": [{"token_ids": [34]}, {"token_ids": [35]}, {"error": "it broke"}],
        "slow": [*pieces, {"token_ids": [36], "delay_ms": 60_000}],
        "silent": [{"token_ids": [36], "delay_ms": 60_000}],
        "dies": [{"token_ids": [34]}, {"token_ids": [35]}, {"token_ids": [36], "delay_ms": 60_000}],
    }
    return {name: start_sidecar(script(name, *steps), name=name) for name, steps in scripts.items()}


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecars: dict[str, ServerProcess]) -> Bridge:
    bridge = start_bridge(**{name: sidecar.address for name, sidecar in sidecars.items()}).wait_healthy()
    deadline = time.monotonic() + 20
    while len(bridge.client.get("/v1/models").json()["data"]) < len(sidecars):
        assert time.monotonic() < deadline, bridge.log
        time.sleep(0.05)
    return bridge


@pytest.fixture
def client(bridge: Bridge) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bridge.client.base_url}/v1", api_key="none", max_retries=0)


def frames_of(bridge: Bridge, model: str, **fields: Any) -> list[str]:
    """What a stream's frames carry."""
    body = {"model": model, "messages": HI, "stream": True, **fields}
    response = bridge.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]


WISHES: Json = {"tools": TOOLS, "logprobs": True, "top_logprobs": 0}
EXTRA: Json = {"return_token_ids": True}
USAGE: Any = {"include_usage": True}


def whole(client: openai.OpenAI) -> Json:
    create: Any = client.chat.completions.create
    return comparable(create(model="calls", messages=HI, extra_body=EXTRA, **WISHES).to_dict(exclude_unset=True))


def test_the_sync_client_gets_the_unstreamed_answer_B09_B10(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="calls", messages=HI, stream=True, stream_options=USAGE, extra_body=EXTRA, **WISHES
    )
    body = comparable(assembled([chunk.to_dict(exclude_unset=True) for chunk in chunks]))
    assert body == whole(client)
    [choice] = body["choices"]
    assert choice["message"]["reasoning_content"] == "hm \N{HOT PEPPER}"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["ls", "ls"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [
        -i / 8 for i in range(len(choice["token_ids"]))
    ]


async def test_the_async_client_gets_the_unstreamed_answer(bridge: Bridge, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as many:
        chunks = await many.chat.completions.create(
            model="calls", messages=HI, stream=True, stream_options=USAGE, extra_body=EXTRA, **WISHES
        )
        got = [chunk.to_dict(exclude_unset=True) async for chunk in chunks]
    assert comparable(assembled(got)) == whole(client)


def test_the_streaming_helper_gets_the_unstreamed_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="calls", messages=HI, tools=STRICT, stream_options=USAGE) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    unstreamed = client.chat.completions.create(model="calls", messages=HI, tools=STRICT)
    message, expected = final.choices[0].message, unstreamed.choices[0].message
    assert message.content == expected.content == "I look."
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"p": "a"}'] * 2
    ids = [call.id for call in (*(message.tool_calls or ()), *(expected.tool_calls or ()))]
    assert len(set(ids)) == 4
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage == unstreamed.usage


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 0}, {"top_logprobs": None}], ids=["absent", "0", "null"])
def test_each_token_has_its_logprob_once_A02(bridge: Bridge, top: Json) -> None:
    chunks: list[Any] = [
        json.loads(frame) for frame in frames_of(bridge, "text", logprobs=True, max_tokens=3, **top)[:-1]
    ]
    entries: list[Json] = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["logprob"] for entry in entries] == [0.0, -1 / 8, -2 / 8]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    refused = bridge.chat(model="text", stream=True, logprobs=False, top_logprobs=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")


def test_every_reader_gets_the_same_text_C11(bridge: Bridge, client: openai.OpenAI) -> None:
    body = {"model": "text", "messages": HI, "stream": True}
    with bridge.client.stream("POST", "/v1/chat/completions", json=body) as response:
        raw = b"".join(response.iter_raw())
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.isascii()
    assert raw.endswith(b"\n\n")
    for lines in (raw.decode("latin-1").splitlines(), raw.decode().split("\n")):
        data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        deltas = [json.loads(frame)["choices"][0]["delta"] for frame in data[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == SEPARATORS
    chunks = client.chat.completions.create(model="text", messages=HI, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SEPARATORS


def test_usage_comes_only_when_asked_for_C08(bridge: Bridge) -> None:
    for options in ({}, {"include_usage": False}, None):
        *chunks, done = frames_of(bridge, "text", stream_options=options)
        assert done == "[DONE]"
        assert not any("usage" in json.loads(chunk) for chunk in chunks)
    *chunks, last, done = frames_of(bridge, "text", stream_options={"include_usage": True})
    usage = json.loads(last)
    assert usage["choices"] == []
    assert usage["usage"] == bridge.chat("hi", model="text").json()["usage"]
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "stop"
    refused = bridge.chat(model="text", stream_options={"include_usage": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


def test_what_is_wrong_before_the_first_chunk_has_its_status_C05(bridge: Bridge, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI, stream=True)
    long: list[Any] = [{"role": "user", "content": "word " * 300}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="text", messages=long, stream=True)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="text", messages=HI, stream=True, extra_body={"tool_choice": "maybe"})
    assert bridge.chat(model="other", stream=True).headers["content-type"] == "application/json"


def test_an_engine_that_fails_ends_the_stream_with_an_error_C04(bridge: Bridge, client: openai.OpenAI) -> None:
    chunks: list[Any] = []
    with pytest.raises(openai.APIError) as raised:
        chunks.extend(client.chat.completions.create(model="fails", messages=HI, stream=True))
    assert raised.value.code == "engine_error"
    *given, last = frames_of(bridge, "fails")
    assert json.loads(last).keys() == {"error"}
    assert json.loads(last)["error"].keys() == {"message", "type", "param", "code"}
    choices = [choice for frame in given for choice in json.loads(frame)["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "23"
    assert all(choice["finish_reason"] is None for choice in choices)


@asynccontextmanager
async def tape_at(address: str, tape_id: str) -> AsyncGenerator[Any]:
    """Open a tape, and give what returns its entries."""
    async with dial(address) as channel:
        tapes = TapeServiceStub(channel)
        opened = await tapes.OpenTape(OpenTapeRequest(tape_id=tape_id))

        async def entries() -> list[TapeEntry]:
            request = GetTapeRequest(tape_id=tape_id, reader_token=opened.reader_token)
            return list((await tapes.GetTape(request)).entries)

        yield entries


@pytest.mark.parametrize(("model", "chunks"), [("slow", 3), ("silent", 1)], ids=["while sampling", "before a token"])
async def test_a_client_that_leaves_aborts_its_call_C01(
    bridge: Bridge, sidecars: dict[str, ServerProcess], model: str, chunks: int
) -> None:
    tape_id = f"{model}.{'c01' + '0' * 29}"
    body = {"model": model, "messages": HI, "stream": True, "metadata": {"tape_id": tape_id}}
    async with tape_at(sidecars[model].address, tape_id) as entries:
        async with (
            httpx.AsyncClient(base_url=bridge.client.base_url) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            assert response.headers["x-tape-id"] == tape_id
            lines = response.aiter_lines()
            for _ in range(2 * chunks - 1):
                await anext(lines)
        left = time.monotonic()
        while not (finished := [e.choice_finished for e in await entries() if e.HasField("choice_finished")]):
            assert time.monotonic() - left < 1, "the engine goes on"
            await asyncio.sleep(0.02)
    assert finished[0].completion.finish_reason == FINISH_REASON_ABORT
    assert "ERROR" not in bridge.log
    assert bridge.client.get("/health").status_code == 200


def test_a_conversation_goes_on_from_a_streamed_answer(bridge: Bridge, sidecars: dict[str, ServerProcess]) -> None:
    tape_id = "text." + "5" * 32

    async def open_tape() -> None:
        async with tape_at(sidecars["text"].address, tape_id):
            pass

    def ask(messages: list[Any]) -> Json:
        fields = {"messages": messages, "metadata": {"tape_id": tape_id}, "return_token_ids": True}
        return assembled([json.loads(frame) for frame in frames_of(bridge, "text", **fields)[:-1]])

    asyncio.run(open_tape())
    first = ask(HI)
    second = ask([*HI, first["choices"][0]["message"], {"role": "user", "content": "Go on."}])
    assert second["tokentape"]["parent_call_id"] == first["tokentape"]["call_id"]
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_a_sidecar_that_dies_ends_every_stream_with_an_error_C04(
    bridge: Bridge, sidecars: dict[str, ServerProcess]
) -> None:
    body = {"model": "dies", "messages": HI, "max_tokens": 9, "stream": True}
    bodies = {"chat/completions": body, "completions": {**body, "prompt": ["a", "b"]}, "messages": body}
    with ExitStack() as opened:
        answers: dict[str, Iterator[str]] = {}
        for route, asked in bodies.items():
            response = opened.enter_context(bridge.client.stream("POST", f"/v1/{route}", json=asked))
            answers[route] = (line for line in response.iter_lines() if line.startswith("data: "))
            for _ in range(2):
                next(answers[route])
        sidecars["dies"].kill()
        killed = time.monotonic()
        errors = {route: json.loads([*lines][-1].removeprefix("data: "))["error"] for route, lines in answers.items()}
    assert time.monotonic() - killed < 5
    assert errors["chat/completions"]["code"] == errors["completions"]["code"] == "sidecar_unavailable"
    assert errors["messages"]["details"] == {"error_code": "sidecar_unavailable"}


def test_connections_are_kept_after_a_stream_C12(bridge: Bridge) -> None:
    url = bridge.client.base_url
    connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=20)
    for _ in range(3):
        body = json.dumps({"model": "text", "messages": HI, "stream": True})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        first = connection.sock
        response = connection.getresponse()
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert connection.sock is first
    connection.close()
