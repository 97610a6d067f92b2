"""A running sidecar: one engine, its calls and tapes, and the gRPC servers in front of them.

Shutdown, each phase bounded:

1. health turns to NOT_SERVING and new calls are refused;
2. running calls finish within the grace period; the rest are aborted and end with what they have;
3. tapes' watchers and other streams get a moment to read on, then the server closes;
4. the engine closes, unless it was handed in.

An engine that dies turns health to NOT_SERVING and fails its calls with UNAVAILABLE; the server stays up to say so.
One that stalls does the same until it answers again (see `stall`).
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Self

import grpc.aio

from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.generation_servicer import GenerationServicer
from tokentape_sidecar.grpc_server import GrpcServer
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.settings import Listener
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS, StallWatch
from tokentape_sidecar.tape_servicer import TapeServicer
from tokentape_sidecar.tape_store import TapeStore
from tokentape_sidecar.tokenizer_archive import pack_tokenizer

logger = logging.getLogger(__name__)

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
TAPE_SERVICE = tape_pb2.DESCRIPTOR.services_by_name["TapeService"].full_name

_READERS_GRACE_SECONDS = 1.0


class Sidecar:
    """A sidecar that serves. Make one with `start`."""

    def __init__(
        self, engine: Engine, *, name: str, tokenizer_archive: bytes, stall_limit_seconds: float, limits: Limits
    ) -> None:
        """Use `start`."""
        self.name = name
        self._engine = engine
        self._tokenizer_archive = tokenizer_archive
        self._calls = Calls(engine)
        self._tapes = TapeStore(name, engine.model, self._calls)
        self._engine_dead = False
        self._stall_watch = (
            StallWatch(engine, self._calls, limit_seconds=stall_limit_seconds, on_change=self._tell_health)
            if stall_limit_seconds
            else None
        )
        self._limits = limits
        self._tasks: list[asyncio.Task[None]] = []
        self._data: GrpcServer | None = None

    @classmethod
    async def start(
        cls,
        engine: Engine,
        *,
        data: Listener,
        name: str,
        control: Listener | None = None,
        weights_root: Path | None = None,
        limits: Limits = DEFAULT_LIMITS,
        stall_limit_seconds: float = DEFAULT_STALL_LIMIT_SECONDS,
    ) -> Self:
        """Serve `engine`: generation and tapes at `data` (port 0 picks a free one; `address` then tells it).

        `control` is where the trainer's controls are served, `weights_root` below what they load checkpoints from;
        `None`: nowhere, none. An engine that emits nothing for `stall_limit_seconds`, while calls run and nobody holds
        it, has stalled; 0: it may be silent for ever.

        Raises `AddressInUse`, or `NotFound` where the engine's tokenizer directory holds no tokenizer.
        """
        del control, weights_root
        archive = await asyncio.to_thread(pack_tokenizer, engine.model.tokenizer_directory)
        sidecar = cls(
            engine, name=name, tokenizer_archive=archive, stall_limit_seconds=stall_limit_seconds, limits=limits
        )
        await sidecar._start(data)
        return sidecar

    async def _start(self, data: Listener) -> None:
        self._data = await GrpcServer.start(
            data,
            (GENERATION_SERVICE, TAPE_SERVICE),
            self._add_data_services,
            max_message_bytes=self._limits.max_message_bytes,
        )
        self._tasks = [
            asyncio.create_task(self._follow_engine()),
            asyncio.create_task(self._tapes.sweep_forever()),
        ]
        await self._tell_health()

    def _add_data_services(self, server: grpc.aio.Server) -> None:
        servicer = GenerationServicer(
            engine=self._engine,
            calls=self._calls,
            tapes=self._tapes,
            sidecar_name=self.name,
            tokenizer_archive=self._tokenizer_archive,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        tape_pb2_grpc.add_TapeServiceServicer_to_server(TapeServicer(tapes=self._tapes, calls=self._calls), server)

    @property
    def address(self) -> str:
        """Where generation and tapes are served."""
        return self._data.address if self._data else ""

    @property
    def running_call_count(self) -> int:
        """Calls that have not ended."""
        return self._calls.running_count

    async def stop(self, *, grace_seconds: float) -> None:
        """Stop serving, as the module says; the engine is the caller's to close. Stopping twice does no harm."""
        data = self._data
        if data is None:
            return
        await data.leave_service()
        await self._calls.drain(grace_seconds)
        await data.stop(_READERS_GRACE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._calls.close()

    async def _follow_engine(self) -> None:
        watch = asyncio.create_task(self._stall_watch.run()) if self._stall_watch else None
        try:
            await self._engine.wait_dead()
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        logger.error("the engine has died; this sidecar no longer serves")
        self._engine_dead = True
        await self._tell_health()

    async def _tell_health(self) -> None:
        stalled = self._stall_watch is not None and self._stall_watch.stalled
        if self._data is not None:
            await self._data.tell_health(serves=not (self._engine_dead or stalled))
