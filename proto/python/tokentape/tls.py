"""How a server is guarded: TLS, and the rule that a public address needs it."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

from tokentape.file_signature import Signature, signature_of
from tokentape.listen import ListenAddress, UnixAddress
from tokentape.secret_file import reason_of


class UnusableCertificate(ValueError):
    """A server's certificate cannot be used; the message names the options."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate, and whose it asks of its clients. All files are PEM."""

    certificate_file: Path
    """The certificate, and those that lead from it to the authority."""
    key_file: Path
    """The private key of `certificate_file`."""
    client_ca_file: Path | None = None
    """Clients must show a certificate that these authorities have signed. Absent: they need none."""

    def signatures(self) -> tuple[Signature | None, ...]:
        """Return what the files are now; it changes when one of them is replaced."""
        files = (self.certificate_file, self.key_file, self.client_ca_file)
        return tuple(None if file is None else signature_of(file) for file in files)

    def context(self) -> ssl.SSLContext:
        """Return what serves with the files as they are now. Raises `UnusableCertificate` where they do not serve."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            told = f"--tls-certificate {self.certificate_file} with --tls-key {self.key_file}"
            raise UnusableCertificate(f"{told} cannot be used: {reason_of(error)}") from error
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca_file)
            except OSError as error:
                told = f"--tls-client-ca {self.client_ca_file}"
                raise UnusableCertificate(f"{told} cannot be used: {reason_of(error)}") from error
        return context


def _no_password() -> str:
    # Without this, OpenSSL would ask for it at the terminal.
    raise ValueError("the key is encrypted: a server has nobody to ask for the password")


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add a server's TLS options; `tls_from` reads them."""
    group = parser.add_argument_group("TLS")
    group.add_argument(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="serve over TLS, with the certificate (PEM) in FILE; it is read again whenever it changes",
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
