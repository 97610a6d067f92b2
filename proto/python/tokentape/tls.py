"""How a server is guarded: TLS, and the rule that a public address needs it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tokentape.listen import ListenAddress, UnixAddress


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate, and whose it asks of its clients. All files are PEM."""

    certificate_file: Path
    """The certificate, and those that lead from it to the authority."""
    key_file: Path
    """The private key of `certificate_file`."""
    client_ca_file: Path | None = None
    """Clients must show a certificate that these authorities have signed. Absent: they need none."""


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add a server's TLS options; `tls_from` reads them."""
    group = parser.add_argument_group("TLS")
    group.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="serve over TLS, with the certificate (PEM) in FILE"
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="mutual TLS: serve only clients whose certificates the authorities in FILE (PEM) have signed",
    )


def tls_from(options: argparse.Namespace, parser: argparse.ArgumentParser) -> ServerTls | None:
    """Return what the options of `add_tls_options` say; `parser` exits where they do not go together."""
    certificate, key = options.tls_certificate, options.tls_key
    if (certificate is None) != (key is None):
        parser.error("--tls-certificate and --tls-key go together")
    if certificate is None:
        if options.tls_client_ca is not None:
            parser.error("--tls-client-ca needs --tls-certificate and --tls-key")
        return None
    for option, file in (
        ("--tls-certificate", certificate),
        ("--tls-key", key),
        ("--tls-client-ca", options.tls_client_ca),
    ):
        if file is not None and not file.is_file():
            parser.error(f"{option}: there is no file {file}")
    return ServerTls(certificate, key, options.tls_client_ca)


def refuse_unguarded(
    parser: argparse.ArgumentParser,
    option: str,
    address: ListenAddress | UnixAddress,
    *,
    tls: ServerTls | None,
    needed_option: str,
    needed_file: Path | None,
) -> None:
    """Let `parser` exit where `address`, given as `option`, is public and lacks TLS or a token (`needed_option`)."""
    if not address.is_public:
        return
    missing = [
        *(["--tls-certificate and --tls-key"] if tls is None else []),
        *([needed_option] if needed_file is None else []),
    ]
    if missing:
        parser.error(f"{option}: other machines can reach {address}: it needs {' and '.join(missing)}")
