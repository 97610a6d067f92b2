"""The directory in which the workers of one bridge share their metrics.

A bridge and its workers hold a lock on it as long as one of them lives, so that the next bridge can tell what a killed
one has left, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "tokentape-bridge-metrics-"


@dataclass(frozen=True, slots=True)
class MetricsDirectory:
    """A directory of our own, under a lock."""

    path: Path
    lock: int
    """The descriptor that holds the lock: whoever inherits it keeps the directory from being swept."""


@contextmanager
def metrics_directory() -> Generator[MetricsDirectory]:
    """Remove what killed bridges of this user have left, and make a directory; on leaving, remove it."""
    sweep()
    while (lock := _lock(path := Path(tempfile.mkdtemp(prefix=_PREFIX)))) is None:
        # Another bridge has swept it between its making and its locking.
        pass
    try:
        yield MetricsDirectory(path, lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep() -> None:
    """Remove this user's directories in the directory for temporary files that no bridge and no worker holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another user's, a link, or another sweeper's by now.
        with contextlib.suppress(OSError):
            if (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of our directory `path`; `None` where it is another's, or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.getuid() and path.exists():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
