"""Where a gRPC server listens, and whom it lets in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokentape.keepalive import DEFAULT_KEEPALIVE, Keepalive
from tokentape.listen import ListenAddress, UnixAddress
from tokentape.tls import ServerTls


class AddressInUse(RuntimeError):
    """The address to listen on cannot be had."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a gRPC server listens, and whom it lets in."""

    address: ListenAddress | UnixAddress
    token_file: Path | None = None
    """Bearer tokens, any of which lets in; `None`: none is asked for."""
    tls: ServerTls | None = None
    """Never on a Unix socket."""
    token_option: str = "--token-file"  # noqa: S105 - its name
    """The option that gave `token_file`, for messages."""
    keepalive: Keepalive = DEFAULT_KEEPALIVE
    """How it notices clients that are gone without a word."""
