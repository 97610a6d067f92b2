"""Ports that stay ours while no server listens at them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server of ours listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@contextlib.contextmanager
def reserved(host: str = "127.0.0.1", port: int = 0) -> Generator[Address]:
    """Reserve `port` (0: a free one) of `host`, one of this machine's. Raises `OSError` where it cannot be had.

    A socket is bound to it and never listens. Linux then gives the port to nobody by itself, but lets a server that
    sets SO_REUSEADDR, as ours and uvicorn do, listen there, end, and listen there again.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(where)
        yield Address(host, int(reservation.getsockname()[1]))
