"""What one sampled token costs the process in front of vLLM's engine, by the way that it takes.

    python bench/front_end.py [--requests 256] [--tokens 128] [--model .cache/SmolLM2-135M-Instruct]

A real `AsyncLLM` is loaded, then its engine core is replaced by one that emits a token for every request at every step
at once, so that nothing but the front end is at work. The core's own part is measured alone and taken off. CPU time of
this process per token, with the log-probability of the sampled token:

- decode, vLLM: reading the core's message of a step, of a token for every request, by vLLM's own decoder;
- decode, direct: reading the same message as our direct path does it;
- direct: our adapter's direct path, from the message that was read to the record;
- public: our adapter's public path, to the record;
- generate: `AsyncLLM.generate`, deltas with flat log-probabilities, read and thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Sampling
from tokentape_sidecar.vllm_engine import VllmEngine
from tokentape_sidecar.vllm_engine.step_decoder import StepDecoder

PROMPT = [504, 3575, 282, 4649, 314]
TOKEN = 260
ROW = LogprobsLists(
    np.array([[TOKEN]], dtype=np.int32), np.array([[-0.5]], dtype=np.float32), np.array([0], dtype=np.int32), None
)
READ_ROW: Any = (TOKEN, -0.5)
"""The row as `StepDecoder` hands it to the direct path."""


class InstantCore:
    """Stands in for the engine core: at every step a token for every request, until each has its number."""

    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, row: Any = ROW) -> None:
        self.row = row
        self.left: dict[str, int] = {}
        """How many tokens each request is to get."""
        self._added = asyncio.Event()

    async def add_request_async(self, request: Any) -> None:
        self.left[request.request_id] = request.sampling_params.max_tokens
        self._added.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.left.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        await self.requests()
        await asyncio.sleep(0)
        return self.step()

    async def requests(self) -> None:
        while not self.left:
            self._added.clear()
            await self._added.wait()

    def step(self) -> EngineCoreOutputs:
        outputs = [
            EngineCoreOutput(request_id, [TOKEN], self.row, finish_reason=FinishReason.LENGTH if left == 1 else None)
            for request_id, left in self.left.items()
        ]
        self.left = {request_id: left - 1 for request_id, left in self.left.items() if left > 1}
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic(), weight_version="default")


@asynccontextmanager
async def instant_engine(model: Path) -> AsyncGenerator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model), dtype="bfloat16", enforce_eager=True, max_model_len=2048, disable_log_stats=True
        )
    )
    engine: Any = llm
    real_core, engine.engine_core = llm.engine_core, InstantCore()
    # The handler that waits for the real core; the first request starts another.
    engine.output_handler.cancel()
    engine.output_handler = None
    engine.get_supported_tasks = lambda: _done(("generate",))
    try:
        yield llm
    finally:
        engine.engine_core = real_core
        await asyncio.to_thread(llm.shutdown)


async def _done(value: Any) -> Any:
    return value


async def through_adapter(llm: AsyncLLM, path: Any, requests: int, tokens: int) -> None:
    core: Any = llm.engine_core
    core.row = READ_ROW if path == "direct" else ROW
    engine = VllmEngine.attach(llm, tokenizer_directory=Path(), path=path)
    calls = Calls(engine)
    records = await asyncio.gather(
        *(calls.start(CallRequest(PROMPT, sampling=Sampling(max_tokens=tokens)), None) for _ in range(requests))
    )
    for record in records:
        await record.wait_ended()
        assert record.sampled_token_count == tokens
    await engine.close()
    core.row = ROW


async def through_generate(llm: AsyncLLM, requests: int, tokens: int) -> None:
    params = SamplingParams(
        max_tokens=tokens, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )

    async def read(name: str) -> None:
        count = 0
        async for output in llm.generate({"prompt_token_ids": PROMPT}, params, name):
            count += len(output.outputs[0].token_ids)
        assert count == tokens

    await asyncio.gather(*(read(f"r{index}-{time.monotonic_ns()}") for index in range(requests)))


def decoding(requests: int, tokens: int, *, direct: bool) -> Callable[[], Awaitable[None]]:
    """Return what reads a step's message, as the core writes it, `tokens` times."""
    names = [f"request-{index:032}" for index in range(requests)]
    outputs = [EngineCoreOutput(name, [TOKEN], ROW) for name in names]
    step = EngineCoreOutputs(outputs=outputs, timestamp=1.0, weight_version="default")
    frames = MsgpackEncoder().encode(step)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    if direct:
        StepDecoder(decoder, dict.fromkeys(names, ""), str)

    async def read() -> None:
        for _ in range(tokens):
            decoder.decode(frames)

    return read


async def core_alone(requests: int, tokens: int) -> None:
    core = InstantCore()
    for index in range(requests):
        core.left[f"request-{index:032}"] = tokens
    while core.left:
        core.step()
        await asyncio.sleep(0)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="per request")
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many counts")
    parser.add_argument("--model", type=Path, default=Path(".cache/SmolLM2-135M-Instruct"))
    options = parser.parse_args()
    size = options.requests, options.tokens
    async with instant_engine(options.model) as llm:
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "decode, vLLM": decoding(*size, direct=False),
            "decode, direct": decoding(*size, direct=True),
            "core alone": lambda: core_alone(*size),
            "direct": lambda: through_adapter(llm, "direct", *size),
            "public": lambda: through_adapter(llm, "public", *size),
            "generate": lambda: through_generate(llm, *size),
        }
        costs = dict.fromkeys(ways, float("inf"))
        for _ in range(options.rounds):
            for name, way in ways.items():
                start = time.process_time()
                await way()
                costs[name] = min(costs[name], (time.process_time() - start) / (size[0] * size[1]) * 1e6)
    print(f"{size[0]} requests of {size[1]} tokens, one token a step each; µs of front-end CPU a token")
    for name in ("decode, vLLM", "decode, direct"):
        print(f"  {name:14} {costs[name]:6.2f}")
    for name in ("direct", "public", "generate"):
        print(f"  {name:14} {costs[name] - costs['core alone']:6.2f}   (core {costs['core alone']:.2f} taken off)")


if __name__ == "__main__":
    asyncio.run(main())
