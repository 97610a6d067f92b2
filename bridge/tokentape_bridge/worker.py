"""One of several processes at one address: `python -m tokentape_bridge.worker DESCRIPTOR OPTION...`. See `workers`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from tokentape_bridge.process import prepare
from tokentape_bridge.server import serve
from tokentape_bridge.settings import parse_settings

_STDIN, _STDOUT, _STDERR = range(3)


def main() -> int:
    """Serve on the inherited listening socket until standard input ends, or a signal; return the exit status."""
    descriptor, *arguments = sys.argv[1:]
    settings = parse_settings(arguments)
    prepare(settings)
    listener = socket.socket(fileno=int(descriptor))
    asyncio.run(serve(settings, listener, _announce, lifeline=_STDIN))
    return 0


def _announce() -> None:
    os.write(_STDOUT, b"serves\n")
    # Nobody reads on: what a library may print goes to the log.
    os.dup2(_STDERR, _STDOUT)


if __name__ == "__main__":
    sys.exit(main())
