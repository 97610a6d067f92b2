"""How a client gets in: the token that it shows, and the certificates by which both sides know each other."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Access:
    """What a client of a sidecar needs, all as files; with none of them it is a plain connection."""

    token_file: Path | None = None
    """Holds the bearer token (its first line), sent with every call; read again whenever it changes."""
    ca_file: Path | None = None
    """Certificates (PEM) of the authorities that the server's is to be signed by. Absent: no TLS. A Unix socket has
    none in any case."""
    certificate_file: Path | None = None
    """With `ca_file`: this client's own certificate (PEM), where the server wants one."""
    key_file: Path | None = None
    """The private key (PEM) of `certificate_file`."""

    def absolute(self) -> Self:
        """Return the same for a process that has another working directory."""
        files = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: file.absolute() for name, file in files.items() if file is not None})


OPEN = Access()
"""A plain connection that shows no token: to a loopback address or a Unix socket."""


class UnusableAccess(ValueError):
    """What is to get a client in cannot be used, or not at that address; the message says what to do."""


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
        help="speak TLS with sidecars, whose certificates the authorities in FILE (PEM) have signed "
        "(not on Unix sockets)",
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


def access_options(access: Access) -> list[str]:
    """Return the command line that says `access`: files' names, no secret. `access_from` reads it."""
    told = {
        "--sidecar-token-file": access.token_file,
        "--sidecar-ca": access.ca_file,
        "--sidecar-certificate": access.certificate_file,
        "--sidecar-key": access.key_file,
    }
    return [word for option, file in told.items() if file is not None for word in (option, str(file))]
