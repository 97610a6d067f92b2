"""The process `tokentape-bridge`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence

from tokentape.process import UnusableReadyFile, clear_ready_file, write_ready_file
from tokentape.tracing import TracingUnavailable
from tokentape_bridge.process import CannotServeError, bind, check, prepare
from tokentape_bridge.settings import Settings, parse_settings, read_arguments

_logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit status: 0, or 1 when it cannot serve."""
    # Its workers read them again, and the file may have changed by then.
    arguments = read_arguments(sys.argv[1:])
    settings = parse_settings(arguments)
    prepare(settings)
    # Only workers share their metrics. One of vLLM's, in the environment of a trainer, is not for us.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    try:
        check(settings)
        listener = bind(settings.listen)
        with listener:
            if settings.ready_file is not None:
                clear_ready_file(settings.ready_file)
            return asyncio.run(_serve(settings, listener, arguments))
    except (CannotServeError, UnusableReadyFile, TracingUnavailable) as error:
        sys.stderr.write(f"tokentape-bridge: {error}\n")
        return 1


async def _serve(settings: Settings, listener: socket.socket, arguments: Sequence[str]) -> int:
    # Their metrics read the environment when they are imported.
    from tokentape_bridge.server import serve  # noqa: PLC0415
    from tokentape_bridge.workers import serve_with_workers  # noqa: PLC0415

    def announce() -> None:
        address = settings.listen.with_port(listener.getsockname()[1])
        _logger.info("serving at %s://%s", "http" if settings.http.tls is None else "https", address)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, address)

    if settings.http.workers == 1:
        await serve(settings, listener, announce)
        return 0
    return 0 if await serve_with_workers(settings.http, listener, arguments, announce) else 1
