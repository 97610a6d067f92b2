"""Secrets in files: bearer tokens and API keys.

A file holds one secret a line; any of them opens, so that secrets can be replaced one after the other. It is read again
whenever it changes, and is to be replaced as a whole. A change that leaves no secret in it changes nothing, and the log
says so. Secrets are compared in constant time, and never logged.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from tokentape.file_signature import signature_of

_logger = logging.getLogger(__name__)


class SecretFile:
    """The secrets of a file, as it is now."""

    def __init__(self, file: Path, option: str) -> None:
        """Read `file`, which the command line gave as `option`. Raises `UnusableSecretFile`."""
        self._file = file
        self._option = option
        self._seen = signature_of(file)
        try:
            self._secrets = _read(file)
        except (OSError, ValueError) as error:
            raise UnusableSecretFile(f"{option} {file} cannot be used: {error}") from error

    def accept(self, shown: bytes) -> bool:
        """Whether `shown` is one of them."""
        self._refresh()
        # All are compared, so that the time tells nothing.
        return sum(secrets.compare_digest(shown, known) for known in self._secrets) > 0

    def show(self) -> str:
        """Return the first of them: the one to show to somebody who asks for it."""
        self._refresh()
        return self._secrets[0].decode("latin-1")

    def _refresh(self) -> None:
        found = signature_of(self._file)
        if found == self._seen:
            return
        self._seen = found
        try:
            self._secrets = _read(self._file)
        except (OSError, ValueError) as error:
            _logger.error("%s %s cannot be used, its secrets stay as they are: %s", self._option, self._file, error)
        else:
            _logger.info("%s %s has changed: %d secrets", self._option, self._file, len(self._secrets))


class UnusableSecretFile(ValueError):
    """A file that should hold secrets holds none, or cannot be read; the message names its option."""


def _read(file: Path) -> list[bytes]:
    secrets_found = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
    if not secrets_found:
        raise ValueError("it holds no secret")
    return secrets_found
