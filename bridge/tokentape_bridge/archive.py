"""Unpacking the tokenizer's archive: data from another process, so nothing in it is trusted.

Only what a tokenizer needs comes out: plain files at the top level, of names that tokenizers have. No more bytes are
unpacked than `MAX_UNPACKED_BYTES`, however small the archive.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from pathlib import Path

MAX_ARCHIVE_BYTES = 128 * 1024 * 1024
"""The largest archive that is fetched."""

MAX_UNPACKED_BYTES = 256 * 1024 * 1024
"""The most bytes that the tar may have, its headers included."""

_READ_BYTES = 64 * 1024

_FILE_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tekken.json",
        "tiktoken.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


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
    try:
        with (
            _BoundedGzip(archive, MAX_UNPACKED_BYTES) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r|") as tar,
        ):
            for member in tar:
                _check(member)
                source = tar.extractfile(member)
                assert source is not None, "_check lets only files through"
                (directory / member.name).write_bytes(source.read())
            # gzip's checksum comes at the end.
            while unpacked.read(_READ_BYTES):
                pass
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise ArchiveError(f"the tokenizer's archive cannot be read: {error}") from error


class _BoundedGzip(gzip.GzipFile):
    """Decompresses up to a number of bytes."""

    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(fileobj=io.BytesIO(data))
        self._most = most
        self._room = most

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes. Raises `ArchiveError` when they are too many in all."""
        data = super().read(size)
        self._room -= len(data)
        if self._room < 0:
            raise ArchiveError(f"the tokenizer's files have more than {self._most} bytes")
        return data


def _check(member: tarfile.TarInfo) -> None:
    if not member.isreg() or member.name not in _FILE_NAMES:
        raise ArchiveError(f"the tokenizer's archive holds {member.name[:80]!a}, which is no file of a tokenizer")
