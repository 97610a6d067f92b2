"""Unpacking the tokenizer's archive: data from another process, so nothing in it is trusted.

Only what a tokenizer needs comes out: plain files at the top level, no links, no paths, no code, and no more bytes
than `MAX_UNPACKED_BYTES`, however small the archive.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

MAX_ARCHIVE_BYTES = 512 * 1024 * 1024
"""The largest archive that is fetched."""

MAX_UNPACKED_BYTES = 1024 * 1024 * 1024
"""The most bytes that all files together may have."""


class ArchiveError(Exception):
    """The archive is damaged, or holds something that no tokenizer needs."""


def verify(archive: bytes, *, sha256: str, size_bytes: int) -> None:
    """Raise `ArchiveError` unless `archive` has this size and this hex SHA-256."""
    if len(archive) != size_bytes:
        raise ArchiveError(f"the tokenizer's archive has {len(archive)} bytes where {size_bytes} were announced")
    if hashlib.sha256(archive).hexdigest() != sha256:
        raise ArchiveError("the tokenizer's archive does not have the SHA-256 that was announced")


def unpack(archive: bytes, directory: Path) -> None:
    """Write the files of the gzip-compressed tar `archive` into `directory`. Raises `ArchiveError` before odd ones."""
    room = MAX_UNPACKED_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            for member in tar:
                _check(member)
                room -= member.size
                if room < 0:
                    raise ArchiveError(f"the tokenizer's files have more than {MAX_UNPACKED_BYTES} bytes")
                source = tar.extractfile(member)
                assert source is not None, "_check lets only files through"
                (directory / member.name).write_bytes(source.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArchiveError(f"the tokenizer's archive cannot be read: {error}") from error


def _check(member: tarfile.TarInfo) -> None:
    name = member.name
    if not member.isreg() or "/" in name or "\\" in name or name in {"", ".", ".."} or "\0" in name:
        raise ArchiveError(f"the tokenizer's archive holds {name[:80]!a}, which is not a plain file at its top level")
    if name.endswith((".py", ".pyc", ".so")):
        raise ArchiveError(f"the tokenizer's archive holds code: {name[:80]!a}")
