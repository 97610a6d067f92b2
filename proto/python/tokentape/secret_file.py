"""Secrets in files: bearer tokens and API keys.

A file holds one secret a line, of printable ASCII as headers carry it; any of them opens, so that secrets can be
replaced one after the other. It is read again whenever it changes, and is to be replaced as a whole. A change that
leaves no secret in it changes nothing, and the log says so; it also says where others than the file's owner may read
it. Secrets are compared in constant time, and never logged.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import stat
from pathlib import Path

from tokentape.file_signature import signature_of

_logger = logging.getLogger(__name__)

_PRINTABLE = re.compile(rb"[ -~]+")


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
            raise UnusableSecretFile(f"{option} {file} cannot be used: {reason_of(error)}") from error
        _warn_of_other_readers(option, file)

    def accept(self, shown: bytes) -> bool:
        """Whether `shown` is one of them."""
        self._refresh()
        # All are compared, so that the time tells nothing.
        return sum(secrets.compare_digest(shown, known) for known in self._secrets) > 0

    def show(self) -> str:
        """Return the first of them: the one to show to somebody who asks for it."""
        self._refresh()
        return self._secrets[0].decode("ascii")

    def _refresh(self) -> None:
        found = signature_of(self._file)
        if found == self._seen:
            return
        self._seen = found
        try:
            self._secrets = _read(self._file)
        except (OSError, ValueError) as error:
            _logger.error(
                "%s %s cannot be used, its secrets stay as they are: %s", self._option, self._file, reason_of(error)
            )
        else:
            _logger.info("%s %s has changed: %d secrets", self._option, self._file, len(self._secrets))
            _warn_of_other_readers(self._option, self._file)


class UnusableSecretFile(ValueError):
    """A file that should hold secrets holds none, or cannot be read; the message names its option."""


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file could not be used, without its name again, as in "No such file or directory"."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read(file: Path) -> list[bytes]:
    if stat.S_ISFIFO(file.stat().st_mode):
        # Who opens one waits for its writer, and a server waits with it.
        raise ValueError("it is a pipe")
    secrets_found = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
    if not secrets_found:
        raise ValueError("it holds no secret")
    if not all(_PRINTABLE.fullmatch(secret) for secret in secrets_found):
        raise ValueError("it holds other characters than printable ASCII")
    return secrets_found


def _warn_of_other_readers(option: str, file: Path) -> None:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return  # replaced again meanwhile
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _warn_once(option, file, mode)


@functools.cache
def _warn_once(option: str, file: Path, mode: int) -> None:
    _logger.warning("%s %s can be read by others (mode %03o): chmod 600 it", option, file, mode)
