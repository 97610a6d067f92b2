"""A running sidecar: one engine, its calls and tapes, and the gRPC server in front of them.

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
from typing import Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from tokentape.channel import KEEPALIVE_SECONDS, MESSAGE_OPTIONS
from tokentape.process import ListenAddress
from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.generation_servicer import GenerationServicer
from tokentape_sidecar.rpc_errors import ErrorInterceptor
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS, StallWatch
from tokentape_sidecar.tape_servicer import TapeServicer
from tokentape_sidecar.tape_store import TapeStore
from tokentape_sidecar.tokenizer_archive import pack_tokenizer

logger = logging.getLogger(__name__)

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
TAPE_SERVICE = tape_pb2.DESCRIPTOR.services_by_name["TapeService"].full_name

_READERS_GRACE_SECONDS = 1.0

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    # Without this a second sidecar on the same port would silently share it.
    ("grpc.so_reuseport", 0),
    # Silence is normal while a long prompt is computed: clients may ping through it, and we notice dead ones.
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    ("grpc.http2.max_ping_strikes", 0),
)


class AddressInUse(RuntimeError):
    """The address to listen on cannot be had."""


class Sidecar:
    """A sidecar that serves. Make one with `start`."""

    def __init__(self, engine: Engine, *, name: str, tokenizer_archive: bytes, stall_limit_seconds: float) -> None:
        """Use `start`."""
        self.name = name
        self.address = ""
        self._engine = engine
        self._calls = Calls(engine)
        self._tapes = TapeStore(name, engine.model, self._calls)
        self._health = HealthServicer()
        self._engine_dead = False
        self._stall_watch = (
            StallWatch(engine, self._calls, limit_seconds=stall_limit_seconds, on_change=self._tell_health)
            if stall_limit_seconds
            else None
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_SERVER_OPTIONS)
        servicer = GenerationServicer(
            engine=engine,
            calls=self._calls,
            tapes=self._tapes,
            sidecar_name=name,
            tokenizer_archive=tokenizer_archive,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)
        tape_pb2_grpc.add_TapeServiceServicer_to_server(
            TapeServicer(tapes=self._tapes, calls=self._calls), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [
                GENERATION_SERVICE,
                TAPE_SERVICE,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ],
            self._server,
        )

    @classmethod
    async def start(
        cls,
        engine: Engine,
        *,
        listen: ListenAddress,
        name: str,
        stall_limit_seconds: float = DEFAULT_STALL_LIMIT_SECONDS,
    ) -> Self:
        """Serve `engine` at `listen` (port 0 picks a free one; `address` then tells it).

        An engine that emits nothing for `stall_limit_seconds`, while calls run and nobody holds it, has stalled; 0: it
        may be silent for ever.

        Raises `AddressInUse`, or `NotFound` where the engine's tokenizer directory holds no tokenizer.
        """
        archive = await asyncio.to_thread(pack_tokenizer, engine.model.tokenizer_directory)
        sidecar = cls(engine, name=name, tokenizer_archive=archive, stall_limit_seconds=stall_limit_seconds)
        try:
            port = sidecar._server.add_insecure_port(str(listen))
        except RuntimeError:
            raise AddressInUse(f"cannot listen on {listen}: the address is in use or not this machine's") from None
        sidecar.address = str(listen.with_port(port))
        await sidecar._server.start()
        sidecar._tasks = [
            asyncio.create_task(sidecar._follow_engine()),
            asyncio.create_task(sidecar._tapes.sweep_forever()),
        ]
        await sidecar._tell_health()
        return sidecar

    @property
    def running_call_count(self) -> int:
        """Calls that have not ended."""
        return self._calls.running_count

    async def stop(self, *, grace_seconds: float) -> None:
        """Stop serving, as the module says; the engine is the caller's to close. Stopping twice does no harm."""
        await self._health.enter_graceful_shutdown()
        await self._calls.drain(grace_seconds)
        await self._server.stop(_READERS_GRACE_SECONDS)
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
        await self._set_health(
            health_pb2.HealthCheckResponse.NOT_SERVING
            if self._engine_dead or stalled
            else health_pb2.HealthCheckResponse.SERVING
        )

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", GENERATION_SERVICE, TAPE_SERVICE):
            await self._health.set(service, status)
