"""Serving the app in one process, and its graceful end.

SIGTERM or SIGINT: no new connections; idle ones close; running requests get the grace period, then are cancelled, which
aborts them at the engine; the channels to the sidecars close. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from tokentape.tracing import tracing
from tokentape_bridge.app import create_app
from tokentape_bridge.process import BACKLOG, read_keys
from tokentape_bridge.settings import Settings
from tokentape_bridge.tls_context import renewing_context

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open. Clients pool theirs for 15 s and more; the server must not close first."""

_ACCEPT_AT_ONCE = 16
"""How many of them one process takes at a time, so that they spread over all that listen."""


async def serve(
    settings: Settings, listener: socket.socket, announce: Callable[[], None], *, lifeline: int | None = None
) -> None:
    """Serve the app on `listener` until a signal, or the end of the file `lifeline` (a descriptor), ends it.

    `announce` is called once it serves. Raises `CannotServeError`, and `TracingUnavailable`.
    """
    tls = settings.http.tls
    config = uvicorn.Config(
        create_app(settings, read_keys(settings)),
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,
        backlog=_ACCEPT_AT_ONCE,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_context_factory=None if tls is None else lambda _config, _default: renewing_context(tls),
        timeout_graceful_shutdown=settings.http.grace_seconds,  # pyright: ignore[reportArgumentType] # fractions are fine
    )
    with tracing(settings.otlp_traces_endpoint, "tokentape-bridge"):
        await _Server(config, announce, lifeline).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it serves, and ends with status 0."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None], lifeline: int | None) -> None:
        super().__init__(config)
        self._announce = announce
        self._lifeline = lifeline
        self._was_signalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started or not sockets:
            return
        # asyncio has set its own idea of a backlog: as many as it accepts at a time.
        sockets[0].listen(BACKLOG)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would leave the requests to asyncio, and end the lifespan with a traceback.
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own raises the signal again once it has shut down, which would be the exit status.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        if self._lifeline is not None:
            loop.add_reader(self._lifeline, self._follow_parent, loop, self._lifeline)
        yield
        for number in signals:
            loop.remove_signal_handler(number)

    def _stop(self) -> None:
        # By signals alone: where a whole process group gets one, the lifeline may end before it arrives.
        self.force_exit = self._was_signalled
        self._was_signalled = self.should_exit = True

    def _follow_parent(self, loop: asyncio.AbstractEventLoop, lifeline: int) -> None:
        """Stop: the lifeline's other end was closed, by a parent that stops or that has died."""
        loop.remove_reader(lifeline)
        self.should_exit = True
