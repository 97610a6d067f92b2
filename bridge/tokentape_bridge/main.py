"""The process `tokentape-bridge`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence

from tokentape.process import write_ready_file
from tokentape_bridge.process import CannotServeError, bind, prepare, read_keys
from tokentape_bridge.settings import Settings, parse_settings

_logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit status: 0, or 1 when it cannot serve."""
    arguments = sys.argv[1:]
    settings = parse_settings(arguments)
    prepare(settings)
    # Only workers share their metrics. One of vLLM's, in the environment of a trainer, is not for us.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    try:
        read_keys(settings)
        listener = bind(settings.listen)
    except CannotServeError as error:
        sys.stderr.write(f"tokentape-bridge: {error}\n")
        return 1
    with listener:
        return asyncio.run(_serve(settings, listener, arguments))


async def _serve(settings: Settings, listener: socket.socket, arguments: Sequence[str]) -> int:
    # Their metrics read the environment when they are imported.
    from tokentape_bridge.server import serve  # noqa: PLC0415
    from tokentape_bridge.workers import serve_with_workers  # noqa: PLC0415

    def announce() -> None:
        address = settings.listen.with_port(listener.getsockname()[1])
        _logger.info("serving at http://%s", address)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, address)

    if settings.http.workers == 1:
        await serve(settings, listener, announce)
        return 0
    return 0 if await serve_with_workers(settings.http, listener, arguments, announce) else 1
