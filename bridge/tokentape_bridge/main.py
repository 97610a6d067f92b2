"""The process `tokentape-bridge`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from tokentape.process import configure_logging
from tokentape_bridge.server import bind, serve
from tokentape_bridge.settings import parse_settings


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit status: 0, or 1 when the address cannot be served at."""
    settings = parse_settings()
    configure_logging(settings.log_level)
    # transformers imports torch wherever it is installed: 3 s and 200 MB for a tokenizer that uses none of it.
    # It then advises to install it, at the level of warnings.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType] # None is Python's way to bar an import
    try:
        listener = bind(settings.listen)
    except OSError as error:
        # Python appends the address to the system's words; a failed look-up of the host has words of its own.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        sys.stderr.write(f"tokentape-bridge: cannot listen at {settings.listen}: {reason}\n")
        return 1
    asyncio.run(serve(settings, listener))
    return 0
