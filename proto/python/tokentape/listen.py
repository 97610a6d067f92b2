"""Where a server process listens, and to whom it is exposed there."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MAX_PORT = 65535
_ANY, _ANY_IPV4 = "::", "0.0.0.0"  # noqa: S104 - only where the user says so
_UNIX = "unix:"
MAX_UNIX_PATH_BYTES = 107
"""The longest path of a Unix socket, as Linux has it."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a TCP port to listen on; port 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT`, with IPv6 hosts in brackets; on a machine without IPv6 the host `::` is `0.0.0.0`.

        Raises `argparse.ArgumentTypeError` on anything else.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > _MAX_PORT:
            raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT (as in 127.0.0.1:50051; port 0 picks one)")
        host = host.removeprefix("[").removesuffix("]")
        return cls(_ANY_IPV4 if host == _ANY and not _has_ipv6() else host, int(port))

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


def _has_ipv6() -> bool:
    """Whether this machine has IPv6; some can bind `::` all the same, and then nobody gets there by it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def is_unix(address: str) -> bool:
    """Whether `address` is a Unix socket's."""
    return address.startswith(_UNIX)


def parse_address(text: str) -> ListenAddress | UnixAddress:
    """Read `HOST:PORT` or `unix:/PATH`. Raises `argparse.ArgumentTypeError` on anything else."""
    if not is_unix(text):
        return ListenAddress.parse(text)
    path = Path(text.removeprefix(_UNIX))
    if not path.is_absolute():
        raise argparse.ArgumentTypeError(f"{text!r} is not unix:/PATH: the path must be absolute")
    if len(str(path).encode()) > MAX_UNIX_PATH_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than the {MAX_UNIX_PATH_BYTES} bytes of a socket's path")
    return UnixAddress(path)
