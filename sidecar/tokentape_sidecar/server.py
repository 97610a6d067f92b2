"""A running sidecar: one engine, its calls and tapes, and the gRPC servers in front of them.

Shutdown, each phase bounded:

1. health turns to NOT_SERVING, and new calls and controls are refused;
2. running calls finish within the grace period; the rest are aborted and end with what they have;
3. an operation of the controls that has begun ends within the same grace period, or is cancelled; tapes' watchers and
   other streams get a moment to read on, then the servers close;
4. the engine closes, unless it was handed in.

An engine that dies turns health to NOT_SERVING and fails its calls with UNAVAILABLE; the server stays up to say so.
One that stalls does the same until it answers again (see `stall`), and one whose weights are broken until an update of
them succeeds (see `control`). The controls, on a server of their own, are there to see all of that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Self

import grpc.aio

from tokentape.listen import UnixAddress
from tokentape.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.control import Control
from tokentape_sidecar.control_servicer import ControlServicer
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.generation_servicer import GenerationServicer
from tokentape_sidecar.grpc_server import GrpcServer
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.metrics import Measured
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS, StallWatch
from tokentape_sidecar.tape_servicer import TapeServicer
from tokentape_sidecar.tape_store import TapeStore
from tokentape_sidecar.tape_text import TapeText
from tokentape_sidecar.tokenizer_archive import pack_tokenizer
from tokentape_sidecar.unix_socket import make_private_directory

logger = logging.getLogger(__name__)

GENERATION_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
CONTROL_SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
TAPE_SERVICE = tape_pb2.DESCRIPTOR.services_by_name["TapeService"].full_name

_READERS_GRACE_SECONDS = 1.0


class Sidecar:
    """A sidecar that serves. Make one with `start`."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        tokenizer_archive: bytes,
        weights_root: Path | None,
        stall_limit_seconds: float,
        limits: Limits,
    ) -> None:
        """Use `start`."""
        self.name = name
        self._engine = engine
        self._tokenizer_archive = tokenizer_archive
        self._calls = Calls(engine, limits)
        self._tapes = TapeStore(name, engine.model, self._calls, limits)
        self.control = Control(engine, self._calls, weights_root=weights_root, on_change=self._tell_health)
        """The trainer's controls, served or not."""
        self._stall_watch = (
            StallWatch(engine, self._calls, limit_seconds=stall_limit_seconds, on_change=self._tell_health)
            if stall_limit_seconds
            else None
        )
        self._limits = limits
        self._tasks: list[asyncio.Task[None]] = []
        self._data_server: GrpcServer | None = None
        self._control_server: GrpcServer | None = None

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

        Raises `AddressInUse`, also for a control socket in a directory that others may enter; `NotFound` where the
        engine's tokenizer directory holds no tokenizer.
        """
        archive = await asyncio.to_thread(pack_tokenizer, engine.model.tokenizer_directory)
        sidecar = cls(
            engine,
            name=name,
            tokenizer_archive=archive,
            weights_root=weights_root,
            stall_limit_seconds=stall_limit_seconds,
            limits=limits,
        )
        await sidecar._start(data, control)
        return sidecar

    async def _start(self, data: Listener, control: Listener | None) -> None:
        if control is not None:
            self._control_server = await self._start_control(control)
        try:
            await self._start_data(data)
        except BaseException:
            if self._control_server is not None:
                await self._control_server.stop(0)
            raise

    async def _start_control(self, listener: Listener) -> GrpcServer:
        address = listener.address
        if isinstance(address, UnixAddress):
            make_private_directory(address.path.parent)
        server = await GrpcServer.start(
            listener, (CONTROL_SERVICE,), self._add_control, max_message_bytes=self._limits.max_message_bytes
        )
        if isinstance(address, UnixAddress):
            address.path.chmod(0o600)
        await server.tell_health(serves=True)
        return server

    def _add_control(self, server: grpc.aio.Server) -> None:
        servicer = ControlServicer(control=self.control, engine=self._engine, calls=self._calls, tapes=self._tapes)
        control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)

    async def _start_data(self, data: Listener) -> None:
        self._data_server = await GrpcServer.start(
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
        tapes = TapeServicer(tapes=self._tapes, calls=self._calls, text=TapeText(self._tokenizer_archive))
        tape_pb2_grpc.add_TapeServiceServicer_to_server(tapes, server)

    @property
    def address(self) -> str:
        """Where generation and tapes are served."""
        return self._data_server.address if self._data_server else ""

    @property
    def control_address(self) -> str | None:
        """Where the controls are served; `None`: nowhere."""
        return self._control_server.address if self._control_server else None

    @property
    def measured(self) -> Measured:
        """What the metrics are read from."""
        return Measured(self.name, self._engine, self._calls, self._tapes, self._limits, self.control)

    @property
    def running_call_count(self) -> int:
        """Calls that have not ended."""
        return self._calls.running_count

    async def stop(self, *, grace_seconds: float) -> None:
        """Stop serving, as the module says; the engine is the caller's to close. Stopping twice does no harm."""
        data = self._data_server
        if data is None:
            return
        self.control.refuse()
        servers = [data] if self._control_server is None else [data, self._control_server]
        for server in servers:
            await server.leave_service()
        grace_ends = time.monotonic() + grace_seconds
        await self._calls.drain(grace_seconds)
        await self.control.close(grace_ends - time.monotonic())
        await asyncio.gather(*(server.stop(_READERS_GRACE_SECONDS) for server in servers))
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
        self.control.engine_dead = True
        await self._tell_health()

    async def _tell_health(self) -> None:
        if self._data_server is not None:
            await self._data_server.tell_health(serves=self.control.serves)
