"""A lone stream on one engine: read in the engine's own process, and by another process through the sidecar, in turn.

    python -m bench.lone [--model tiny] [--calls 100] [--engine-options ...]

Prints when the first token comes, and how far apart the others are. Engine and sidecar are in this process: what the
other one sees later is what gRPC, the sidecar and its client add.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.clients import CLIENTS
from bench.gpu import ENGINE_OPTIONS
from bench.in_process import engine_of, generate
from bench.models import SHAPES, model_directory
from bench.readings import Load, Readings

_WARM_UP_CALLS = 20
_TOKENS = 24
_WAYS = {"in process": "`AsyncLLM.generate`, deltas", "generate-many": "`GenerateMany`", "generate": "`Generate`"}


class Reader:
    """Another process, which reads a sidecar when it is told to."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_reading, args=(address, theirs), daemon=True)
        self._process.start()

    async def read(self, kind: str, prompt: list[int]) -> Readings:
        """Make one call of a kind of `CLIENTS`."""
        return await asyncio.to_thread(self._ask, (kind, prompt))

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()

    def _ask(self, job: tuple[str, list[int]]) -> Any:
        self._pipe.send(job)
        return self._pipe.recv()


def _reading(address: str, pipe: Connection) -> None:
    async def read() -> None:
        loads = {kind: Load(kind, address, streams=1, new_tokens=_TOKENS) for kind in _WAYS if kind in CLIENTS}
        clients = {kind: CLIENTS[kind](load, CLIENTS[kind].shared(load)) for kind, load in loads.items()}
        while job := await asyncio.to_thread(pipe.recv):
            kind, prompt = job
            readings = Readings()
            await clients[kind].request(prompt, readings)
            pipe.send(readings)

    asyncio.run(read())


async def lone(directory: Path, calls: int, engine_options: list[str]) -> dict[str, Readings]:
    """Return what each way gave; the ways take turns."""
    from tokentape.listen import ListenAddress  # noqa: PLC0415 - beside vLLM's imports, which take seconds
    from tokentape_sidecar.listener import Listener  # noqa: PLC0415
    from tokentape_sidecar.server import Sidecar  # noqa: PLC0415
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415

    llm = await engine_of(str(directory), engine_options)
    engine = VllmEngine.attach(llm)
    sidecar = await Sidecar.start(engine, data=Listener(ListenAddress("127.0.0.1", 0)), name="main")
    reader = Reader(sidecar.address)
    taken: dict[str, list[Readings]] = {way: [] for way in _WAYS}
    try:
        for _ in range(_WARM_UP_CALLS + calls):
            for way, readings in taken.items():
                prompt = random.choices(range(1000, 40_000), k=128)
                if way in CLIENTS:
                    readings.append(await reader.read(way, prompt))
                else:
                    readings.append(Readings())
                    await generate(llm, prompt, _TOKENS, readings[-1])
    finally:
        await asyncio.to_thread(reader.close)
        await sidecar.stop(grace_seconds=0)
        await engine.close()
        llm.shutdown()
    return {way: Readings.joined(readings[_WARM_UP_CALLS:]) for way, readings in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lone", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--calls", type=int, default=100, help="each way")
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    parser.add_argument("--out", type=Path, default=Path("out/lone"))
    parser.add_argument("--engine-options", nargs=argparse.REMAINDER, default=[], help="more of vLLM's; at the end")
    options = parser.parse_args()
    directory = model_directory(options.model, options.tokenizer, options.out.resolve() / "models")
    engine = [*ENGINE_OPTIONS, "--gpu-memory-utilization", "0.8", *options.engine_options]
    all_readings = asyncio.run(lone(directory, options.calls, engine))
    figures = {way: readings.medians() for way, readings in all_readings.items()}
    (options.out / "results.json").write_text(json.dumps(figures, indent=1))
    for way, medians in figures.items():
        print(f"{_WAYS[way]:30}" + "  ".join(f"{name} {value:.2f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
