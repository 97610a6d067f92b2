"""Telling whether a file has been replaced."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[int, int, int]
"""Of one state of a file: its inode, time of change in nanoseconds, and size in bytes."""


def signature_of(file: Path) -> Signature | None:
    """Return what `file` is now; `None` where it is not there, or cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
