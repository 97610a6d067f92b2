"""A bridge process in front of sidecars of this process, and what clients see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    import ssl

    from integration.conftest import ServerProcess

_HEALTHY_SECONDS = 45


def answering_engine(tokenizer: Path, *steps: Mapping[str, Any]) -> ScriptedEngine:
    """Return an engine that gives every call the same answer."""
    model = {"name": "toy", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
    calls = [{"steps": steps or ({"token_ids": [34, 35, 2], "finish_reason": "stop"},)}]
    return ScriptedEngine(Script.model_validate({"model": model, "calls": calls, "repeat": True}), tokenizer)


@dataclass(frozen=True, slots=True)
class RunningBridge:
    """A bridge process and an HTTP client of it."""

    process: ServerProcess
    http: httpx.AsyncClient

    async def chat(self, content: str = "What is 2+3?", **fields: Any) -> httpx.Response:
        """Ask for a chat completion; `fields` are the rest of the body."""
        messages = [{"role": "user", "content": content}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **fields})

    async def state(self) -> str:
        """Return what the bridge says of its one sidecar."""
        answer = (await self.http.get("/health")).json()
        return str(answer["error"]["message"] if "error" in answer else answer["sidecars"]["main"])

    async def until_state(self, part: str) -> None:
        """Return when `part` occurs in what the bridge says of its one sidecar."""
        async with asyncio.timeout(_HEALTHY_SECONDS):
            while part not in await self.state():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)


@asynccontextmanager
async def bridge_process(
    directory: Path,
    *options: str,
    sidecar: str,
    key: str | None = None,
    tls: ssl.SSLContext | None = None,
    healthy: bool = True,
) -> AsyncGenerator[RunningBridge]:
    """Run `tokentape-bridge` in front of `sidecar`, named main, until it serves (`healthy`: the sidecar too).

    The client shows `key`, and speaks TLS with `tls`.
    """
    from integration.conftest import ServerProcess  # noqa: PLC0415 - a conftest

    command = ["tokentape-bridge", "--listen", "127.0.0.1:0", "--sidecar", f"main={sidecar}", *options]
    process = ServerProcess(command, directory)
    try:
        address = await asyncio.to_thread(lambda: process.address)
        async with httpx.AsyncClient(
            base_url=f"{'http' if tls is None else 'https'}://{address}",
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            verify=tls or False,
            trust_env=False,
            timeout=20,
        ) as http:
            bridge = RunningBridge(process, http)
            if healthy:
                await bridge.until_state("SERVING")
            yield bridge
    finally:
        # In a thread: it waits for its requests, which end with sidecars of this one.
        await asyncio.to_thread(process.__exit__, None, None, None)
