"""One running sidecar, as a run sees it: what it serves, whether it serves now, and its tapes."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tokentape.access import OPEN, Access, UnusableAccess
from tokentape.channel import dial
from tokentape.v1 import generation_pb2, generation_pb2_grpc
from tokentape_executor.errors import StartFailed
from tokentape_executor.tape_client import TapeClient

_RETRY_SECONDS = 0.2
_RPC_SECONDS = 5.0


class Health(enum.Enum):
    """Whether a sidecar serves."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    """It answers, but its engine is dead, or it is stopping."""
    AWAY = "away"
    """It does not answer."""


class Sidecar:
    """A sidecar's client. Belongs to the event loop of its channel."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        model: generation_pb2.GetModelResponse,
        *,
        time_to_live_seconds: float,
    ) -> None:
        """Use `connect`."""
        self.address = address
        self.model = model
        """What it served when it was asked first."""
        self.name = model.sidecar_name
        self.tapes = TapeClient(channel, self.name, time_to_live_seconds=time_to_live_seconds)
        self.channel = channel
        self.health = Health.SERVING
        self.opening = 0
        """Rollouts that are about to open a tape here."""
        self.open_tapes: set[str] = set()
        """Tapes of rollouts that run."""

    @classmethod
    async def connect(
        cls, address: str, *, timeout_seconds: float, time_to_live_seconds: float, access: Access = OPEN
    ) -> Self:
        """Return the sidecar at `address` (HOST:PORT or unix:/PATH), which lets in `access`, as soon as it answers.

        Its tapes are kept for `time_to_live_seconds`. Raises `StartFailed` where it does not answer in time, or
        does not let in `access`.
        """
        try:
            channel = dial(address, access)
        except UnusableAccess as error:
            raise StartFailed(str(error)) from error
        try:
            model = await _model(address, channel, timeout_seconds)
        except BaseException:
            await channel.close()
            raise
        return cls(address, channel, model, time_to_live_seconds=time_to_live_seconds)

    @property
    def load(self) -> int:
        """How many rollouts it has."""
        return self.opening + len(self.open_tapes)

    async def follow(self, changed: Callable[[], object]) -> None:
        """Keep `health` up to date until cancelled; `changed` is called after each change."""
        # grpc_health's own stub has no types.
        watch = self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        while True:
            call = watch(HealthCheckRequest())
            try:
                async for update in call:
                    serves = update.status == HealthCheckResponse.SERVING
                    self._turn(Health.SERVING if serves else Health.NOT_SERVING, changed)
            except grpc.aio.AioRpcError:
                pass
            finally:
                call.cancel()
            self._turn(Health.AWAY, changed)
            await asyncio.sleep(_RETRY_SECONDS)

    def _turn(self, health: Health, changed: Callable[[], object]) -> None:
        if health is not self.health:
            self.health = health
            changed()


async def _model(address: str, channel: grpc.aio.Channel, timeout_seconds: float) -> generation_pb2.GetModelResponse:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return await stub.GetModel(generation_pb2.GetModelRequest(), timeout=_RPC_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise StartFailed(
                    f"the sidecar at {address} does not let us in (--sidecar-token-file): {error.details()}"
                ) from None
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise StartFailed(
                    f"the sidecar at {address} did not answer within {timeout_seconds:g} s: "
                    f"{error.code().name}: {error.details()}"
                ) from None
        await asyncio.sleep(_RETRY_SECONDS)
