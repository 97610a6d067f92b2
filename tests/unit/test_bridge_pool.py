"""Which sidecar the bridge sends a request to, as sidecars come, go and fail; real ones, over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from support.scripted import TOY_TOKENIZER, call, script, tokens
from tokentape.listen import ListenAddress
from tokentape_bridge import sidecar as sidecar_module
from tokentape_bridge import tokenizer_loading
from tokentape_bridge.errors import ApiError
from tokentape_bridge.settings import ChatSettings
from tokentape_bridge.sidecar_file import SidecarTable
from tokentape_bridge.sidecar_pool import SidecarPool, open_pool
from tokentape_bridge.tokenizer import Tokenizer, TokenizerError
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar

TAPE = "0" * 32


@asynccontextmanager
async def serving(name: str) -> AsyncGenerator[Sidecar]:
    made = Script.model_validate(script(call(tokens(1, finish="stop")), repeat=True))
    engine = ScriptedEngine(made, TOY_TOKENIZER)
    running = await Sidecar.start(engine, data=Listener(ListenAddress("127.0.0.1", 0)), name=name)
    try:
        yield running
    finally:
        await running.stop(grace_seconds=0)


async def tell_health(sidecar: Sidecar, *, serves: bool) -> None:
    """Let a sidecar say whether it serves."""
    server = sidecar._data_server  # pyright: ignore[reportPrivateUsage]
    assert server is not None
    await server.tell_health(serves=serves)


async def until_health(pool: SidecarPool, **expected: str | None) -> None:
    async with asyncio.timeout(20):
        while True:
            if await pool.health() == expected:
                return
            await asyncio.sleep(0.02)


async def test_a_sidecar_that_does_not_serve_gets_no_calls() -> None:
    async with (
        serving("a") as a,
        serving("b") as b,
        open_pool(SidecarTable({"a": a.address, "b": b.address}, None), ChatSettings()) as pool,
    ):
        await until_health(pool, a=None, b=None)
        await tell_health(a, serves=False)
        # That is what it says when its engine has died.
        await until_health(pool, a="NOT_SERVING", b=None)
        for _ in range(3):
            # It still answers GetModel.
            with pytest.raises(ApiError, match="sidecar a does not serve") as raised:
                await pool.choose(f"a.{TAPE}", None)
            assert (raised.value.status, raised.value.code) == (503, "sidecar_unavailable")
            busy, _ = await pool.choose("", None)
            with busy.occupied():
                assert (await pool.choose("", None))[0].name == "b"
        await tell_health(a, serves=True)
        await until_health(pool, a=None, b=None)
        assert (await pool.choose(f"a.{TAPE}", None))[0].name == "a"


async def test_an_unusable_tokenizer_is_tried_ever_less_often_and_traced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: object) -> Tokenizer:
        raise TokenizerError("transformers cannot load it")

    monkeypatch.setattr(Tokenizer, "load", load)
    monkeypatch.setattr(tokenizer_loading, "_loaded", {})
    monkeypatch.setattr(sidecar_module, "_RETRY_SECONDS", 0.02)
    with caplog.at_level(logging.ERROR, logger=sidecar_module.__name__):
        async with serving("a") as a, open_pool(SidecarTable({"a": a.address}, None), ChatSettings()) as pool:
            await asyncio.sleep(0.7)
            with pytest.raises(ApiError, match="cannot load") as raised:
                await pool.choose("", None)
            assert raised.value.code == "tokenizer_unusable"
            assert "cannot load" in str((await pool.health())["a"])
    assert 2 <= len(caplog.records) <= 6, "after 0.04 s, 0.08 s, and so on"
    assert [bool(record.exc_info) for record in caplog.records] == [True] + [False] * (len(caplog.records) - 1)


@pytest.mark.parametrize("name", ["-a", "_a", "a" * 65, "a.b", ""])
async def test_a_tape_id_is_what_sidecars_take_for_one(name: str) -> None:
    async with open_pool(SidecarTable({"a": "127.0.0.1:1"}, None), ChatSettings()) as pool:
        with pytest.raises(ApiError, match="is not of the form"):
            await pool.choose(f"{name}.{TAPE}", None)
