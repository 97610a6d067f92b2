"""Scripted sidecars: in this process where speed matters, in a process of their own where the process matters.

The scripted engine, gRPC and the sockets are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from support.sidecar_client import SidecarClient
from tokentape.keepalive import DEFAULT_KEEPALIVE, Keepalive
from tokentape.listen import ListenAddress
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS

TOY_TOKENIZER = Path(__file__).parent / "toy_tokenizer"
"""A tokenizer in which every byte is a token and its id is its value: "a" is 97."""

SIDECAR_COMMAND = str(Path(sys.executable).with_name("tokentape-sidecar"))

Json: TypeAlias = "dict[str, object]"

_START_SECONDS = 30.0


def call(*steps: Json, expect: Sequence[int] | None = None) -> Json:
    """A call of a script; `expect` is the prompt that it must come with."""
    made: Json = {"steps": list(steps)}
    if expect is not None:
        made["expect"] = {"prompt_token_ids": list(expect)}
    return made


def tokens(*token_ids: int, choice: int = 0, finish: str | None = None, **more: object) -> Json:
    """A step of a script: these tokens at once, then the end if `finish` says so."""
    return {"index": choice, "token_ids": list(token_ids), "finish_reason": finish, **more}


def script(*calls: Json, repeat: bool = False, **model: object) -> Json:
    """A whole script; `model` holds fields of the format's `model`."""
    return {"model": {"name": "toy", "vocab_size": 1000, **model}, "calls": list(calls), "repeat": repeat}


@dataclass(frozen=True, slots=True)
class RunningSidecar:
    """A sidecar in this process and a client of it."""

    sidecar: Sidecar
    client: SidecarClient


@asynccontextmanager
async def sidecar_on(
    engine: Engine,
    *,
    name: str = "main",
    stall_limit_seconds: float = DEFAULT_STALL_LIMIT_SECONDS,
    limits: Limits = DEFAULT_LIMITS,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
    control: Listener | None = None,
    weights_root: Path | None = None,
) -> AsyncGenerator[RunningSidecar]:
    """Serve `engine` on a free port; on leaving, running calls are aborted."""
    sidecar = await Sidecar.start(
        engine,
        data=Listener(ListenAddress("127.0.0.1", 0), keepalive=keepalive),
        name=name,
        stall_limit_seconds=stall_limit_seconds,
        limits=limits,
        control=control,
        weights_root=weights_root,
    )
    try:
        async with SidecarClient(sidecar.address, name) as client:
            yield RunningSidecar(sidecar, client)
    finally:
        await sidecar.stop(grace_seconds=0)
        await engine.close()


@asynccontextmanager
async def scripted_sidecar(
    *calls: Json, repeat: bool = False, tokenizer: Path = TOY_TOKENIZER, **model: object
) -> AsyncGenerator[RunningSidecar]:
    """Serve a script in this process."""
    engine = ScriptedEngine(Script.model_validate(script(*calls, repeat=repeat, **model)), tokenizer)
    async with sidecar_on(engine) as running:
        yield running


class SidecarProcess:
    """A `tokentape-sidecar` process."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, address: str) -> None:
        self.process = process
        self.address = address
        self._output = output

    @property
    def output(self) -> str:
        """What it has written to standard error so far."""
        return self._output.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def wait(self, seconds: float) -> int:
        """Return its exit code; TimeoutExpired if it has not ended by then."""
        return await asyncio.to_thread(self.process.wait, seconds)

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@asynccontextmanager
async def sidecar_process(
    *arguments: str, directory: Path, seconds: float = _START_SECONDS
) -> AsyncGenerator[SidecarProcess]:
    """Run `tokentape-sidecar` with `arguments` on a free port until it serves; killed on leaving."""
    ready, output = directory / "ready.json", directory / "sidecar.log"
    ready.unlink(missing_ok=True)
    with output.open("wb") as log:
        process = _popen(["--listen", "127.0.0.1:0", "--ready-file", str(ready), *arguments], log)
    sidecar = SidecarProcess(process, output, "")
    try:
        async with asyncio.timeout(seconds):
            while not ready.exists():
                assert process.poll() is None, f"the sidecar exited with {process.returncode}:\n{sidecar.output}"
                await asyncio.sleep(0.02)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        sidecar.address = told["address"]
        yield sidecar
    finally:
        sidecar.kill()


def scripted_arguments(content: Json, directory: Path, tokenizer: Path = TOY_TOKENIZER) -> list[str]:
    """Options of `tokentape-sidecar` that make it replay `content`."""
    file = directory / "script.json"
    file.write_text(json.dumps(content))
    return ["--engine", "scripted", "--script", str(file), "--tokenizer", str(tokenizer)]


def run_sidecar(*arguments: str, seconds: float = _START_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a `tokentape-sidecar` that is expected to end by itself."""
    return subprocess.run(
        [SIDECAR_COMMAND, *arguments], capture_output=True, text=True, timeout=seconds, check=False, env=_environment()
    )


def _popen(arguments: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([SIDECAR_COMMAND, *arguments], stdout=log, stderr=log, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
