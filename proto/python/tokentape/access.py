"""How a client gets in: the token that it shows, and the certificates by which both sides know each other."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """What a client of a sidecar needs, all as files; with none of them it is a plain connection."""

    token_file: Path | None = None
    """Holds the bearer token (its first line), sent with every call; read again whenever it changes."""
    ca_file: Path | None = None
    """Certificates (PEM) of the authorities that the server's is to be signed by. Absent: no TLS."""
    certificate_file: Path | None = None
    """With `ca_file`: this client's own certificate (PEM), where the server wants one."""
    key_file: Path | None = None
    """The private key (PEM) of `certificate_file`."""


OPEN = Access()
"""A plain connection that shows no token: to a loopback address or a Unix socket."""


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to get into a sidecar; `access_from` reads them."""
    group = parser.add_argument_group("access to sidecars")
    group.add_argument(
        "--sidecar-token-file",
        type=Path,
        metavar="FILE",
        help="show the bearer token in FILE (its first line) to sidecars; it is read again whenever it changes",
    )
    group.add_argument(
        "--sidecar-ca",
        type=Path,
        metavar="FILE",
        help="speak TLS with sidecars, whose certificates the authorities in FILE (PEM) have signed",
    )
    group.add_argument(
        "--sidecar-certificate", type=Path, metavar="FILE", help="own certificate (PEM) for mutual TLS with sidecars"
    )
    group.add_argument("--sidecar-key", type=Path, metavar="FILE", help="its private key (PEM)")


def access_from(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Access:
    """Return what the options of `add_access_options` say; `parser` exits where they do not go together."""
    certificate, key = options.sidecar_certificate, options.sidecar_key
    if (certificate is None) != (key is None):
        parser.error("--sidecar-certificate and --sidecar-key go together")
    if certificate is not None and options.sidecar_ca is None:
        parser.error("--sidecar-certificate needs --sidecar-ca: without it there is no TLS")
    return Access(
        token_file=options.sidecar_token_file,
        ca_file=options.sidecar_ca,
        certificate_file=certificate,
        key_file=key,
    )
