"""Tapes with the text of their tokens, for people: `include_text` of WatchTape and GetTape."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from support.engines import ManualEngine, toy_model
from support.scripted import TOY_TOKENIZER, Json, call, scripted_sidecar, sidecar_on, tokens
from support.sidecar_client import OpenedTape, SidecarClient
from tokentape.v1 import tape_pb2


async def watched(client: SidecarClient, tape: OpenedTape, *, text: bool) -> list[tape_pb2.TapeEntry]:
    request = tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, include_text=text)
    return [entry async for response in client.tapes.WatchTape(request) for entry in response.entries]


def without_text(entry: tape_pb2.TapeEntry) -> tape_pb2.TapeEntry:
    for name in ("call_started", "tokens_sampled"):
        if entry.HasField(name):
            getattr(entry, name).ClearField("text_pieces")
    return entry


async def page(client: SidecarClient, tape: OpenedTape, *, text: bool) -> tape_pb2.GetTapeResponse:
    request = tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, include_text=text)
    return await client.tapes.GetTape(request)


async def test_every_token_has_its_text_when_it_is_asked_for(model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    prompt = tokenizer.encode("<|im_start|>user\nHi there<|im_end|>\n", add_special_tokens=False).ids
    answer: Json = {"text": "Paris, naïvely. 🏳️‍🌈"}
    end = tokens(2, finish="stop")
    async with scripted_sidecar(call(answer, end), tokenizer=model_directory, vocab_size=49152) as running:
        client = running.client
        tape = await client.open_tape()
        await client.generate(prompt, tape_id=tape.tape_id)
        await client.seal(tape)
        entries = await watched(client, tape, text=True)
        got = await page(client, tape, text=True)
        plain = await watched(client, tape, text=False)

    started, *sampled = (entry for entry in entries if entry.call_started.call_id or entry.tokens_sampled.call_id)
    assert list(started.call_started.text_pieces) == [tokenizer.decode([i], skip_special_tokens=False) for i in prompt]
    texts = [text for entry in sampled for text in entry.tokens_sampled.text_pieces]
    ids = [token_id for entry in sampled for token_id in entry.tokens_sampled.token_ids]
    assert len(texts) == len(ids)
    assert "".join(texts).startswith("Paris, naïvely.")
    assert "\ufffd" in "".join(texts)
    assert texts[-1] == "<|im_end|>"
    assert [entry.SerializeToString() for entry in got.entries] == [entry.SerializeToString() for entry in entries]
    # Without it, the same tape and no text.
    assert plain == [without_text(entry) for entry in entries]


async def test_no_text_unless_it_is_asked_for() -> None:
    async with scripted_sidecar(call(tokens(97, finish="stop"))) as running:
        tape = await running.client.open_tape()
        await running.client.generate([98], tape_id=tape.tape_id)
        await running.client.seal(tape)
        for entry in await watched(running.client, tape, text=False):
            assert not entry.call_started.text_pieces
            assert not entry.tokens_sampled.text_pieces


async def test_the_tokenizers_directory_may_be_gone(tmp_path: Path) -> None:
    directory = tmp_path / "tokenizer"
    shutil.copytree(TOY_TOKENIZER, directory)
    async with scripted_sidecar(call(tokens(97, 98, finish="stop")), tokenizer=directory) as running:
        shutil.rmtree(directory)
        tape = await running.client.open_tape()
        await running.client.generate([99], tape_id=tape.tape_id)
        got = await page(running.client, tape, text=True)
    assert list(got.entries[0].call_started.text_pieces) == ["c"]
    assert list(got.entries[1].tokens_sampled.text_pieces) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "problem"), [("tokenizer.model", "no tokenizer.json"), ("tokenizer.json", "cannot be read")]
)
async def test_a_tokenizer_that_cannot_be_read_gives_no_text_but_ids(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / name).write_text('{"model": {}}')
    engine = ManualEngine(dataclasses.replace(toy_model(), tokenizer_directory=tmp_path))
    async with sidecar_on(engine) as running:
        client = running.client
        tape = await client.open_tape()
        await client.seal(tape)
        for refused in (watched(client, tape, text=True), page(client, tape, text=True)):
            with pytest.raises(grpc.aio.AioRpcError, match=problem) as raised:
                await refused
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert len(await watched(client, tape, text=False)) == 1
