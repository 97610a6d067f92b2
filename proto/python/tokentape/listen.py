"""Where a server process listens, and to whom it is exposed there."""

from __future__ import annotations

import argparse
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MAX_PORT = 65535
_UNIX = "unix:"
_MAX_UNIX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a TCP port to listen on; port 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT`, with IPv6 hosts in brackets. Raises `argparse.ArgumentTypeError` on anything else."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > _MAX_PORT:
            raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT (as in 127.0.0.1:50051; port 0 picks one)")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def with_port(self, port: int) -> Self:
        """Return the same host with another port."""
        return type(self)(self.host, port)

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach it: anything but `localhost` and loopback addresses."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket to listen on; only this machine's processes reach it, those that its file's mode lets."""

    path: Path

    @property
    def is_public(self) -> bool:
        """Never: other machines cannot reach it."""
        return False

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


def parse_address(text: str) -> ListenAddress | UnixAddress:
    """Read `HOST:PORT` or `unix:/PATH`. Raises `argparse.ArgumentTypeError` on anything else."""
    if not text.startswith(_UNIX):
        return ListenAddress.parse(text)
    path = Path(text.removeprefix(_UNIX))
    if not path.is_absolute():
        raise argparse.ArgumentTypeError(f"{text!r} is not unix:/PATH: the path must be absolute")
    if len(str(path).encode()) > _MAX_UNIX_PATH_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than the {_MAX_UNIX_PATH_BYTES} bytes of a socket's path")
    return UnixAddress(path)
