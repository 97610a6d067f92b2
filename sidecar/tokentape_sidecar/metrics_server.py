"""Where Prometheus reads the metrics: `GET /metrics`, on an address and in threads of its own.

What is served is all of the process's default registry: vLLM registers its metrics there.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    REGISTRY,
    make_wsgi_app,  # pyright: ignore[reportUnknownVariableType]
)
from prometheus_client.exposition import ThreadingWSGIServer
from typing_extensions import override

from tokentape.listen import ListenAddress
from tokentape_sidecar.listener import AddressInUse
from tokentape_sidecar.metrics import Measured, SidecarCollector

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)

_READ_SECONDS = 10
"""How long a client may take to send its request."""

_POLL_SECONDS = 0.1
"""How often it is looked whether to end."""


@contextmanager
def metrics_served(measured: Measured, listen: ListenAddress | None) -> Generator[ListenAddress | None]:
    """Serve the metrics of a sidecar, and the registry's others, at `listen` within (`None`: nowhere).

    Gives the address that it got. Call it on the sidecar's event loop. Raises `AddressInUse`.
    """
    if listen is None:
        yield None
        return
    try:
        server = make_server(listen.host, listen.port, _answer, _server_class(listen), _Handler)
    except OSError as error:
        raise AddressInUse(f"--metrics-listen: cannot listen on {listen}: {error.strerror}") from None
    collector = SidecarCollector(measured)
    REGISTRY.register(collector)
    thread = Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield listen.with_port(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        REGISTRY.unregister(collector)


_exposition = cast("Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]", make_wsgi_app())


def _answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/metrics":
        try:
            return _exposition(environ, start_response)
        except TimeoutError:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the sidecar's event loop does not answer\n"]
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"metrics are at /metrics\n"]


def _server_class(listen: ListenAddress) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        """Of the address's family; it leaves its threads, each with one request, to end by themselves."""

        address_family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
        daemon_threads = True

        @override
        def handle_error(self, request: object, client_address: object) -> None:
            """Note a client that has gone before its answer."""
            logger.debug("a scrape failed", exc_info=True)

    return Server


class _Handler(WSGIRequestHandler):
    timeout = _READ_SECONDS

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: Prometheus asks every few seconds."""
