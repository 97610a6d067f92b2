"""Tokens of a real engine, read in its own process: `AsyncLLM.generate`, deltas, as nothing in between could be faster.

    python -m bench.in_process MODEL --out FILE [--streams 1,64,256,1024] [--engine-options ...]

`bench.gpu` runs it. Writes a line of JSON for each number of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.readings import Readings, rounds, tokens_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


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


async def in_process(directory: str, streams: list[int], options: argparse.Namespace) -> None:
    """Measure `AsyncLLM.generate` in this process; a line of JSON for each number of streams."""
    llm = await engine_of(directory, options.engine_options)

    async def read(index: int, level: int, new_tokens: int, readings: Readings) -> None:
        prompt = [1000 + (index * 7919 + level * 104_729 + place * 31) % 39_000 for place in range(128)]
        await generate(llm, prompt, new_tokens, readings)

    async def level(count: int, times: int, new_tokens: int) -> Readings:
        readings = Readings(began=time.monotonic())

        async def stream(index: int) -> None:
            for turn in range(times):
                await read(index * times + turn, count, new_tokens, readings)

        await asyncio.gather(*map(stream, range(count)))
        readings.ended = time.monotonic()
        return readings

    try:
        await level(8, 1, 16)
        for count in streams:
            before = time.process_time()
            readings = await level(count, rounds(count), tokens_of(count, options.new_tokens))
            cpu = (time.process_time() - before) / readings.tokens * 1e6
            with options.out.open("a") as file:
                spent = {"cpu_us_per_token": cpu, "cpu_us_per_token_each": [cpu]}
                file.write(json.dumps({"streams": count, **spent, **readings.figures()}) + "\n")
    finally:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.in_process", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="its directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", type=lambda text: list(map(int, text.split(","))), default=[1, 64, 256, 1024])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--engine-options", nargs=argparse.REMAINDER, default=[], help="vLLM's; at the end")
    options = parser.parse_args()
    asyncio.run(in_process(options.model, options.streams, options))


if __name__ == "__main__":
    main()
