"""Run a real server on an engine whose core is a stand-in that pushes a token per request per step.

    python -m bench.pushing [--pace-ms 20] sidecar|http|smg [the server's own arguments]
    python -m bench.pushing --pace-ms 20 core --streams 256 --tokens 256

All of vLLM's front end is its own: only the client of the engine core's process is replaced, so that no model is
computed. Without a pace a step follows when the front end has taken the one before; with it steps come at their times,
whether or not anyone reads. `core` steps with nobody behind it and prints its own CPU time a token in µs, which is to
be taken off the others'.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

_IDS = range(1000, 40_000, 37)
_SAMPLED = [
    (
        token_id,
        LogprobsLists(
            np.array([[token_id]], dtype=np.int32),
            np.array([[-0.1 - token_id % 97 / 10]], dtype=np.float32),
            np.array([0], dtype=np.int32),
            None,
        ),
    )
    for token_id in _IDS
]
"""Tokens to sample, one after the other, with their log-probabilities as the core gives them."""


class PushingCore:
    """Stands in for the client of the engine core's process."""

    engine_ranks_managed = (0,)

    def __init__(self, pace_seconds: float) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._pace = pace_seconds
        self._left: dict[str, int] = {}
        self._new: dict[str, int] = {}
        self._added = asyncio.Event()
        self._sampled = itertools.cycle(_SAMPLED)
        self._pusher: asyncio.Task[None] | None = None

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._new[request.request_id] = len(request.prompt_token_ids)
        self._added.set()
        if self._pace and self._pusher is None:
            self._pusher = asyncio.create_task(self._push())

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        if self._pace:
            return await self.outputs_queue.get()
        await self._wait_for_requests()
        await asyncio.sleep(0)
        return self.step()

    async def _push(self) -> None:
        while True:
            await self._wait_for_requests()
            due = time.monotonic()
            while self._left:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.outputs_queue.put_nowait(self.step())
                due += self._pace

    async def _wait_for_requests(self) -> None:
        while not self._left:
            self._added.clear()
            await self._added.wait()

    def step(self) -> EngineCoreOutputs:
        """Sample a token for every request."""
        outputs: list[EngineCoreOutput] = []
        for request_id, left in self._left.items():
            token_id, rows = next(self._sampled)
            outputs.append(
                EngineCoreOutput(request_id, [token_id], rows, finish_reason=FinishReason.LENGTH if left == 1 else None)
            )
        for output in outputs if self._new else ():
            if prompt := self._new.pop(output.request_id, 0):
                output.prefill_stats = PrefillStats(num_prompt_tokens=prompt, num_computed_tokens=prompt)
        self._left = {request_id: left - 1 for request_id, left in self._left.items() if left > 1}
        return EngineCoreOutputs(
            outputs=outputs,
            scheduler_stats=SchedulerStats(num_running_reqs=len(self._left)),
            timestamp=time.monotonic(),
            weight_version="default",
        )

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_sleeping_async(self) -> bool:
        return False

    async def is_scheduler_paused_async(self) -> bool:
        return False

    async def reset_mm_cache_async(self) -> None:
        """Have nothing to forget."""

    def shutdown(self, timeout: float | None = None) -> None:
        del timeout


async def core_alone(pace: float, streams: int, tokens: int) -> float:
    """Return the core's own CPU time a token, in µs."""
    core = PushingCore(pace)
    for index in range(streams):
        await core.add_request_async(
            SimpleNamespace(
                request_id=f"request-{index:032}",
                sampling_params=SimpleNamespace(max_tokens=tokens),
                prompt_token_ids=[1] * 128,
            )
        )
    start, count = time.process_time(), 0
    while count < streams * tokens:
        count += len((await core.get_output_async()).outputs)
    return (time.process_time() - start) / count * 1e6


def serve(server: str, pace: float, arguments: list[str]) -> None:
    """Run a server as its own command line would, but for the core."""
    from vllm.v1.engine.core_client import EngineCoreClient  # noqa: PLC0415

    client: Any = EngineCoreClient
    client.make_async_mp_client = staticmethod(lambda *_, **__: PushingCore(pace))
    sys.argv = [server, *arguments]
    match server:
        case "sidecar":
            from tokentape_sidecar.main import main  # noqa: PLC0415

            sys.exit(main(arguments))
        case "http":
            from vllm.entrypoints.launchers.api_server.entry import main  # noqa: PLC0415

            main()
        case "smg":
            from vllm.entrypoints.launchers import grpc_server  # noqa: PLC0415

            grpc_server.main()
        case _:
            raise ValueError(server)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pushing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pace-ms", type=float, default=0.0, metavar="MS", help="of a step (default: at once)")
    parser.add_argument("server", choices=["sidecar", "http", "smg", "core"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.server != "core":
        serve(options.server, options.pace_ms / 1e3, options.arguments)
        return
    core = argparse.ArgumentParser()
    core.add_argument("--streams", type=int, default=256)
    core.add_argument("--tokens", type=int, default=256)
    size = core.parse_args(options.arguments)
    print(asyncio.run(core_alone(options.pace_ms / 1e3, size.streams, size.tokens)))


if __name__ == "__main__":
    main()
