"""What tapes, calls and tokens hold in the sidecar's memory.

    python -m bench.memory [--tapes 1000] [--calls 10] [--tokens 200] [--out out/bench]

Resident memory of a sidecar on the stand-in for vLLM's core, before and after so many tapes are opened; after each has
its first call, of one token; after each has more of them; and after as many calls of so many tokens more. No tape is
sealed or deleted. A load of the same shape comes before the first reading, so that what is allocated once is there.
Writes OUT/memory.json: bytes of a tape without a call, of the first call and a later one of one token, and of a token.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from bench import on_stand_in
from bench.servers import Server

from tokentape.channel import dial
from tokentape.many_calls import ManyCalls
from tokentape.v1 import generation_pb2, tape_pb2_grpc, types_pb2

_AT_ONCE = 64
_SETTLE_SECONDS = 2.0
_EMPTY_TAPES = 10
"""Times the number of the others, as an empty one is small."""


@dataclass(frozen=True)
class Size:
    """Of a load: tapes, calls of each, sampled tokens of each call."""

    tapes: int
    calls: int
    tokens: int


class Holding:
    """A sidecar that holds more and more."""

    def __init__(self, server: Server, tapes: tape_pb2_grpc.TapeServiceAsyncStub, calls: ManyCalls) -> None:
        self._server = server
        self._tapes = tapes
        self._calls = calls

    async def open(self, count: int) -> tuple[list[str], float]:
        """Open tapes; return their ids, and the bytes that came to the sidecar's memory for each."""
        before = self._server.memory_bytes()
        ids = await on_stand_in.open_tapes(self._tapes, count)
        return ids, (await self._settled() - before) / count

    async def call(self, tape_ids: list[str], calls: int, tokens: int) -> float:
        """Let each tape have calls, one after the other; return the bytes for each call."""
        before = self._server.memory_bytes()
        turns = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._calls_of(tape_id, calls, tokens, turns) for tape_id in tape_ids))
        return (await self._settled() - before) / (len(tape_ids) * calls)

    async def _calls_of(self, tape_id: str, calls: int, tokens: int, turns: asyncio.Semaphore) -> None:
        sampling = types_pb2.SamplingParameters(max_tokens=tokens, ignore_eos=True)
        request = generation_pb2.GenerateRequest(prompt_token_ids=[1000], sampling=sampling, tape_id=tape_id)
        async with turns:
            for _ in range(calls):
                call = self._calls.begin(request)
                await call.whole()
                if len(call.choices[0].token_ids) != tokens:
                    raise RuntimeError(f"{len(call.choices[0].token_ids)} tokens of {tokens}")

    async def _settled(self) -> int:
        await asyncio.sleep(_SETTLE_SECONDS)
        return self._server.memory_bytes()


async def held_by(holding: Holding, size: Size) -> dict[str, float]:
    """Return the bytes of each kind. Few tapes or tokens give noise, for memory comes in pages and arenas."""
    warm, _ = await holding.open(max(1, size.tapes // 5))
    await holding.call(warm, size.calls, size.tokens)
    _, empty = await holding.open(_EMPTY_TAPES * size.tapes)
    tape_ids, _ = await holding.open(size.tapes)
    first = await holding.call(tape_ids, 1, 1)
    later = await holding.call(tape_ids, size.calls, 1)
    long = await holding.call(tape_ids, size.calls, size.tokens)
    return {
        "bytes_per_empty_tape": empty,
        "bytes_per_first_call": first,
        "bytes_per_later_call": later,
        "bytes_per_token": (long - later) / (size.tokens - 1),
    }


async def measured(size: Size, sidecar: Server) -> dict[str, float]:
    async with dial(sidecar.address) as channel:
        calls = ManyCalls(channel)
        try:
            held = await held_by(Holding(sidecar, tape_pb2_grpc.TapeServiceStub(channel), calls), size)
        finally:
            await calls.close()
    print(held, flush=True)
    return held | asdict(size)


def main() -> None:
    parser = on_stand_in.parser("memory", __doc__)
    parser.add_argument("--tapes", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10, help="of a tape")
    parser.add_argument("--tokens", type=int, default=200, help="sampled in a long call")
    options = parser.parse_args()
    size = Size(options.tapes, options.calls, options.tokens)
    on_stand_in.measure("memory", options, lambda sidecar: measured(size, sidecar))


if __name__ == "__main__":
    main()
