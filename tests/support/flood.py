"""A sidecar process whose engine samples fast, whether or not anybody reads: `python -m support.flood DIRECTORY`.

Token `i` of every call is `token_id(i)`, with log-probability `logprob(i)` and, where asked for, the top `TOP_IDS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from support.engines import ManualEngine, toy_model
from support.scripted import sidecar_on
from tokentape_sidecar.engine import EngineCall, FinishReason, Sink, TopLogprobs

K = 20
TOKENS_PER_SECOND = 2500
TOP_IDS = [16_384 + i for i in range(K)]
BYTES_PER_TOKEN = 8 + 8 * K
"""In a record: ids and log-probabilities of four bytes each."""

_STEP = 100
_PERIOD = 4096
_READY, _ENDS = "flood.json", "ends"


def token_id(position: int) -> int:
    """One of the toy tokenizer's, and printable."""
    return 97 + position % 26


def logprob(position: int) -> float:
    """A float that four bytes hold exactly."""
    return -(position % _PERIOD) / 16


class FloodEngine(ManualEngine):
    """Samples `max_tokens` for every call."""

    def __init__(self, ends: Path) -> None:
        """`ends` gets a line for each call that ends by itself: its id, and when, by the monotonic clock."""
        super().__init__(toy_model(max_context_tokens=10_000_000, vocabulary_size=50_000))
        self._ends = ends
        self._pumps: set[asyncio.Task[None]] = set()

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        await super().submit(call, sink)
        pump = asyncio.create_task(self._pump(call, sink))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump(self, call: EngineCall, sink: Sink) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        top = TopLogprobs(K, TOP_IDS * _STEP, [-float(i) for i in range(K)] * _STEP)
        for start in range(0, call.sampling.max_tokens or 0, _STEP):
            if call.call_id not in self.sinks:
                return
            ids = [token_id(i) for i in range(start, start + _STEP)]
            logprobs = [logprob(i) for i in range(start, start + _STEP)]
            sink.append(0, ids, logprobs, top_logprobs=top if call.sampling.top_logprobs else None)
            await asyncio.sleep(max(0.0, began + (start + _STEP) / TOKENS_PER_SECOND - loop.time()))
        with self._ends.open("a") as ends:
            ends.write(f"{call.call_id} {time.monotonic()}\n")
        self.sinks.pop(call.call_id).finish(0, FinishReason.LENGTH)


class Flood:
    """The process, as its clients see it."""

    def __init__(self, address: str, process: psutil.Process, ends: Path) -> None:
        self.address = address
        self._ends = ends
        self._process = process

    @property
    def memory_bytes(self) -> int:
        """What it has in memory."""
        return self._process.memory_info().rss

    @property
    def ends(self) -> dict[str, float]:
        """When its engine had sampled the last token of a call, by the monotonic clock."""
        return {call_id: float(at) for call_id, at in map(str.split, self._ends.read_text().splitlines())}


@asynccontextmanager
async def flood(directory: Path) -> AsyncGenerator[Flood]:
    """Run the process; it must end well."""
    ready, ends = directory / _READY, directory / _ENDS
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "support.flood",
        str(directory),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        async with asyncio.timeout(30):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield Flood(json.loads(ready.read_text()), psutil.Process(process.pid), ends)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _serve(directory: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with sidecar_on(FloodEngine(directory / _ENDS)) as running:
        draft = directory / f"{_READY}.draft"
        draft.write_text(json.dumps(running.sidecar.address))
        draft.replace(directory / _READY)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
