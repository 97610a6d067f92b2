"""Running the app: the listening socket, the ready file, and a graceful end.

SIGTERM or SIGINT: no new connections; idle ones close; running requests get `GRACE_SECONDS`, then are cancelled, which
aborts them at the engine; the channels to the sidecars close. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Generator

import uvicorn

from tokentape.process import ListenAddress, write_ready_file
from tokentape_bridge.app import create_app
from tokentape_bridge.settings import Settings

_logger = logging.getLogger(__name__)

GRACE_SECONDS = 30
"""How long running requests may go on after the first signal."""

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open. Clients pool theirs for 15 s and more; the server must not close first."""

_BACKLOG = 2048


def bind(address: ListenAddress) -> socket.socket:
    """Return a socket that listens at `address`. Raises `OSError` when that is taken or not this host's."""
    host, port = address.host, address.port
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve the app on `listener` until a signal ends it."""
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    await _Server(config, settings).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it serves, and ends with status 0."""

    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started or not sockets:
            return
        port: int = sockets[0].getsockname()[1]
        address = self._settings.listen.with_port(port)
        _logger.info("serving at http://%s", address)
        if self._settings.ready_file is not None:
            write_ready_file(self._settings.ready_file, address)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own raises the signal again once it has shut down, which would be the exit status.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        yield
        for number in signals:
            loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
