"""One gRPC server: its listener, the services on it, their health and reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from tokentape.channel import KEEPALIVE_SECONDS
from tokentape.listen import ListenAddress
from tokentape_sidecar.rpc_errors import ErrorInterceptor
from tokentape_sidecar.settings import Listener

_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class AddressInUse(RuntimeError):
    """The address to listen on cannot be had."""


class GrpcServer:
    """A server that serves. Make one with `start`."""

    def __init__(self, server: grpc.aio.Server, address: str, services: Sequence[str], health: HealthServicer) -> None:
        """Use `start`."""
        self.address = address
        """Where it listens, as a client dials it."""
        self._server = server
        self._services = services
        self._health = health

    @classmethod
    async def start(
        cls,
        listener: Listener,
        services: Sequence[str],
        add: Callable[[grpc.aio.Server], None],
        *,
        max_message_bytes: int,
    ) -> Self:
        """Serve `services` (full names), which `add` adds; all are NOT_SERVING until `tell_health` says otherwise.

        Raises `AddressInUse`.
        """
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_options(max_message_bytes))
        health = HealthServicer()
        add(server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        reflection.enable_server_reflection([*services, _HEALTH_SERVICE, reflection.SERVICE_NAME], server)
        address = listener.address
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError:
            raise AddressInUse(f"cannot listen on {address}: the address is in use or not this machine's") from None
        bound = address.with_port(port) if isinstance(address, ListenAddress) else address
        started = cls(server, str(bound), services, health)
        await started.tell_health(serves=False)
        await server.start()
        return started

    async def tell_health(self, *, serves: bool) -> None:
        """Say of every service, and of the server as a whole, whether it serves."""
        status = health_pb2.HealthCheckResponse
        for service in ("", *self._services):
            await self._health.set(service, status.SERVING if serves else status.NOT_SERVING)

    async def leave_service(self) -> None:
        """Turn the health of all services to NOT_SERVING, for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls, and cancel those that have not ended after `grace_seconds`."""
        await self._server.stop(grace_seconds)


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # What we send is as long as what we hold: it has limits of its own.
        ("grpc.max_send_message_length", -1),
        # Without this a second sidecar on the same port would silently share it.
        ("grpc.so_reuseport", 0),
        # Silence is normal while a long prompt is computed: clients may ping through it, and we notice dead ones.
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
        ("grpc.http2.max_ping_strikes", 0),
    ]
