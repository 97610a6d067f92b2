"""Tokens of a real engine, read in its own process, by `AsyncLLM.generate`: nothing is in between."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.readings import Readings, rounds, tokens_of
from bench.servers import ServerFailed, tail

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_START_SECONDS = 240.0
_LOAD_SECONDS = 240.0
_STOP_SECONDS = 20.0


async def engine_of(directory: str, engine_options: Sequence[str]) -> AsyncLLM:
    """Load an engine into this process, by vLLM's own options."""
    from vllm import AsyncEngineArgs  # noqa: PLC0415 - seconds
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    parsed: Any = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["--model", directory, *engine_options]
    )
    return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parsed))


async def generate(llm: AsyncLLM, prompt: list[int], new_tokens: int, readings: Readings) -> None:
    """Ask the engine once, and read the answer to its end."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    params = SamplingParams(
        max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    sent, tokens, arrivals = time.monotonic(), 0, list[float]()
    async for output in llm.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex):
        arrivals.append(time.monotonic())
        tokens += len(output.outputs[0].logprobs or ())
    readings.request("AsyncLLM.generate", sent, arrivals, tokens, new_tokens)


class EngineProcess:
    """A process with an engine, which is read there."""

    def __init__(self, process: SpawnProcess, pipe: Any, log: Path) -> None:
        self._process = process
        self._pipe = pipe
        self._log = log

    @classmethod
    @contextmanager
    def running(
        cls, directory: str, engine_options: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> Generator[EngineProcess]:
        """Run one until the block ends; what it prints is in `log`. Raises `ServerFailed`."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        arguments = (theirs, directory, list(engine_options), log, dict(environment))
        process = context.Process(target=_engine_process, args=arguments)
        process.start()
        theirs.close()
        engine = cls(process, pipe, log)
        try:
            engine._receive(_START_SECONDS)
            yield engine
        finally:
            engine._end()

    def measure(self, streams: int, new_tokens: int) -> dict[str, Any]:
        """Return the figures at a number of streams, or the error; after one there are no more figures."""
        try:
            with suppress(OSError):
                self._pipe.send((streams, rounds(streams), tokens_of(streams, new_tokens)))
            return self._receive(_LOAD_SECONDS)
        except ServerFailed as error:
            self._end()
            return {"error": str(error)}

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            problem = f"has said nothing for {seconds:.0f} s"
        except (EOFError, OSError):
            problem = "has ended"
        raise ServerFailed(f"the engine's process {problem}:\n{tail(self._log)}")

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(_STOP_SECONDS)
        self._process.kill()
        assert self._process.pid is not None
        # The engine's core is a process of its own.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def _engine_process(
    pipe: Connection, directory: str, engine_options: list[str], log: Path, environment: dict[str, str]
) -> None:
    os.setsid()
    os.environ.update(environment)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    asyncio.run(_answer(pipe, directory, engine_options))


async def _answer(pipe: Connection, directory: str, engine_options: list[str]) -> None:
    llm = await engine_of(directory, engine_options)
    try:
        await _load(llm, 8, 1, 16)
        pipe.send({})
        # Nothing else runs on the loop between two loads.
        with suppress(EOFError):
            while True:
                streams, times, new_tokens = pipe.recv()
                pipe.send(await _load(llm, streams, times, new_tokens))
    finally:
        llm.shutdown()


async def _load(llm: AsyncLLM, streams: int, times: int, new_tokens: int) -> dict[str, Any]:
    ids = random.Random(uuid.uuid4().hex)
    prompts = [[ids.choices(range(1000, 40_000), k=128) for _ in range(times)] for _ in range(streams)]
    readings = Readings(began=time.monotonic())
    before = time.process_time()

    async def stream(own: list[list[int]]) -> None:
        for prompt in own:
            await generate(llm, prompt, new_tokens, readings)

    await asyncio.gather(*map(stream, prompts))
    readings.ended = time.monotonic()
    cpu = (time.process_time() - before) / readings.tokens * 1e6
    return {"cpu_us_per_token": cpu, "cpu_us_per_token_each": [cpu], **readings.figures()}
