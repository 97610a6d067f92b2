"""What tokentape's server processes have in common: the `--listen` and `--ready-file` options, and logging."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MAX_PORT = 65535


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

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def add_server_options(parser: argparse.ArgumentParser, *, default_listen: str) -> None:
    """Add `--listen`, `--ready-file` and `--log-level` to a server's options."""
    parser.add_argument(
        "--listen",
        type=ListenAddress.parse,
        default=ListenAddress.parse(default_listen),
        metavar="HOST:PORT",
        help=f"where to serve; port 0 picks a free one (default: {default_listen})",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help='written when, and only when, this process serves: {"address": "HOST:PORT", "pid": N}',
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="least severe messages to log, on standard error (default: info)",
    )


def configure_logging(level: str) -> None:
    """Log to standard error, one line a message, from `level` up."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


def write_ready_file(path: Path, address: ListenAddress) -> None:
    """Publish that this process serves at `address`; readers see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"address": str(address), "pid": os.getpid()}) + "\n")
    draft.replace(path)
