"""One gRPC server: its listener, the services on it, their health and reflection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from tokentape.forks import use_grpc
from tokentape.keepalive import Keepalive
from tokentape.listen import ListenAddress, UnixAddress
from tokentape.secret_file import SecretFile
from tokentape_sidecar.auth import TokenGate
from tokentape_sidecar.listener import AddressInUse, Listener
from tokentape_sidecar.rpc_errors import ErrorInterceptor
from tokentape_sidecar.tls_credentials import server_credentials
from tokentape_sidecar.tracing import TracingInterceptor
from tokentape_sidecar.unix_socket import claimed

_grpc_logger = logging.getLogger("grpc._cython.cygrpc")

_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcServer:
    """A server that serves. Make one with `start`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        address: str,
        services: Sequence[str],
        health: HealthServicer,
    ) -> None:
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

        `max_message_bytes` bounds a request. Raises `AddressInUse`, and `UnusableSecretFile` or `UnusableCertificate`
        where a file of `listener` cannot be used.
        """
        use_grpc()
        _grpc_logger.addFilter(_without_metadata)
        credentials = None if listener.tls is None else server_credentials(listener.tls)
        server = grpc.aio.server(
            interceptors=_interceptors(listener), options=_options(max_message_bytes, listener.keepalive)
        )
        health = HealthServicer()
        add(server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        reflection.enable_server_reflection([*services, _HEALTH_SERVICE, reflection.SERVICE_NAME], server)
        address = listener.address
        with claimed(address.path) if isinstance(address, UnixAddress) else nullcontext():
            try:
                port = _bind(server, str(address), credentials)
            except RuntimeError:
                raise AddressInUse(f"cannot listen on {address}: the address is in use or not this machine's") from None
            _close_to_others(listener)
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
        """Take no more calls, and cancel those that have not ended after `grace_seconds`.

        A Unix socket is gone when that begins, so that its path may have the socket of another server when it ends.
        """
        await self._server.stop(grace_seconds)


def check_files(listener: Listener) -> None:
    """Raise what `GrpcServer.start` would where a file of `listener` cannot be used; see there."""
    _interceptors(listener)
    if listener.tls is not None:
        server_credentials(listener.tls)


def _without_metadata(record: logging.LogRecord) -> bool:
    """Let a line pass, but without the metadata that gRPC could not read: it may be a token."""
    if record.exc_info is not None and isinstance(record.exc_info[1], UnicodeDecodeError):
        record.msg, record.args, record.exc_info = "a client sent metadata that is no text", (), None
    return True


def _interceptors(listener: Listener) -> list[grpc.aio.ServerInterceptor]:
    if listener.token_file is None:
        return [TracingInterceptor(), ErrorInterceptor()]
    tokens = SecretFile(listener.token_file, listener.token_option)
    return [TokenGate(tokens, listener.token_option), TracingInterceptor(), ErrorInterceptor()]


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def _close_to_others(listener: Listener) -> None:
    """Let only this user connect to a Unix socket that asks for no token; with one, the umask says who may."""
    if isinstance(listener.address, UnixAddress) and listener.token_file is None:
        listener.address.path.chmod(0o600)


def _options(max_message_bytes: int, keepalive: Keepalive) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # What we send is as long as what we hold: it has limits of its own.
        ("grpc.max_send_message_length", -1),
        # Without this a second sidecar on the same port would silently share it.
        ("grpc.so_reuseport", 0),
        *keepalive.channel_options(),
        # Clients may ping as often as they like: gRPC would otherwise close the connection of one that does.
        ("grpc.http2.max_ping_strikes", 0),
    ]
