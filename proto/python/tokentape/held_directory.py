"""Temporary directories that do not stay when their processes are killed.

Whoever makes one holds a lock on it for as long as it is in use, by itself and by those that have inherited the lock's
descriptor. So the next one to come can tell what killed processes have left, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class HeldDirectory:
    """A directory of our own, which only this user can enter, under a lock."""

    path: Path
    lock: int
    """The descriptor that holds the lock: whoever inherits it keeps the directory from being swept."""

    @classmethod
    def make(cls, prefix: str, root: str) -> Self:
        """Remove what killed processes of this user have left in `root` under `prefix`, and make a directory there."""
        sweep(prefix, root)
        while (lock := _lock(path := Path(tempfile.mkdtemp(prefix=prefix, dir=root)))) is None:
            # Another process has swept it between its making and its locking.
            pass
        return cls(path, lock)

    def remove(self) -> None:
        """Remove it; once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def sweep(prefix: str, root: str) -> None:
    """Remove this user's directories in `root` whose names begin with `prefix` and that no process holds."""
    for path in Path(root).glob(f"{prefix}*"):
        # Another user's, a link, or another sweeper's by now.
        with contextlib.suppress(OSError):
            if (lock := _lock(path)) is not None:
                HeldDirectory(path, lock).remove()


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
