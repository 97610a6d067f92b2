"""Certificates for tests: authorities, and what they sign, as the files that tokentape takes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from tokentape.access import Access
from tokentape.tls import ServerTls


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate and its private key."""

    certificate: Path
    key: Path

    def become(self, other: CertificateFiles) -> None:
        """Replace both files by those of `other`, the key last, as a renewal does."""
        for mine, others in ((self.certificate, other.certificate), (self.key, other.key)):
            draft = mine.with_suffix(".draft")
            draft.write_bytes(others.read_bytes())
            draft.replace(mine)


class Authority:
    """Signs certificates for this machine's loopback; what it makes goes to a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._name = name
        self._authority = trustme.CA()
        self.ca_file = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.ca_file)
        self._number = 0

    def sign(self, *hosts: str, expired: bool = False) -> CertificateFiles:
        """Return a new certificate for `hosts`; by default for the loopback addresses."""
        self._number += 1
        made = self._authority.issue_cert(
            *(hosts or ("127.0.0.1", "localhost")),
            not_before=datetime.now(UTC) - timedelta(days=2) if expired else None,
            not_after=datetime.now(UTC) - timedelta(days=1) if expired else None,
        )
        files = CertificateFiles(
            self._directory / f"{self._name}-{self._number}.crt", self._directory / f"{self._name}-{self._number}.key"
        )
        files.certificate.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(files.key)
        return files

    def serve(self, *, clients: Authority | None = None, expired: bool = False) -> ServerTls:
        """Return what a server on loopback needs; it asks its clients for a certificate of `clients`."""
        files = self.sign(expired=expired)
        return ServerTls(files.certificate, files.key, clients and clients.ca_file)

    def trusted(self, *, own: CertificateFiles | None = None, token_file: Path | None = None) -> Access:
        """Return what a client needs that trusts this authority, and shows `own` and a token."""
        return Access(token_file, self.ca_file, own and own.certificate, own and own.key)


def secret_file(path: Path, *secrets: str) -> Path:
    """Write a file of secrets as a whole, for its owner alone, and return it."""
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text("".join(f"{secret}\n" for secret in secrets))
    draft.replace(path)
    return path
