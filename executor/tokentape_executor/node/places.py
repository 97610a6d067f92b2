"""The directories of nodes: `<temporary directory>/tokentape-<user id>/<the spec's key>/`.

They belong to the user alone. Three rules keep those who come and those who go from each other's files:

1. A member joins, and starts a keeper, only while it holds the directory's lock.
2. A keeper ends, and removes its directory, only while it holds the lock, and sees then that nobody has joined.
3. Whoever waited for a lock that has been removed meanwhile does not get it (`filelock` sees to that), but begins anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tokentape_executor.errors import StartFailed

_LONGEST_TEMPORARY_ROOT = 50
"""A Unix socket's path may have 107 bytes; 47 are ours at most."""
_LOCK_INTERVAL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """The directory of one node."""

    directory: Path

    @classmethod
    def of(cls, key: str) -> Place:
        """Return the place of the spec whose key this is; nothing is made."""
        return cls(_user_directory() / key)

    @property
    def socket(self) -> Path:
        """Where the keeper listens."""
        return self.directory / "socket"

    @property
    def spec(self) -> Path:
        """The spec, for the keeper to read."""
        return self.directory / "spec.json"

    @property
    def sidecars(self) -> Path:
        """The bridge's `--sidecar-file`."""
        return self.directory / "sidecars.json"

    @property
    def temporary(self) -> Path:
        """The bridge's directory for temporary files."""
        return self.directory / "tmp"

    @property
    def logs(self) -> Path:
        """Where logs go that are not to stay."""
        return self.directory / "logs"

    def connect(self) -> socket.socket | None:
        """Return a connection to the keeper, or `None` where there is none."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def locked(self, go_on: Callable[[], bool], timeout_seconds: float) -> Generator[None]:
        """Make the directory if need be, and hold its lock. Waits for it while `go_on()`.

        Raises `StartFailed` where the lock cannot be had within `timeout_seconds`, or `go_on` has ended, or the
        directory is not ours.
        """
        deadline = time.monotonic() + timeout_seconds
        while (lock := self._try_lock()) is None:
            if not go_on():
                raise StartFailed("it was shut down while it started")
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.directory / 'lock'} is held by another process for {timeout_seconds:g} s")
            time.sleep(_LOCK_INTERVAL_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def _try_lock(self) -> FileLock | None:
        try:
            _make_private(self.directory.parent)
            _make_private(self.directory)
            return self.try_lock()
        except FileNotFoundError:
            # Removed between our making and our opening.
            return None

    def try_lock(self) -> FileLock | None:
        """Return the directory's lock, held until released, or `None` where another holds it.

        Raises `FileNotFoundError` where there is no directory.
        """
        lock = FileLock(str(self.directory / "lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

    def remove(self) -> None:
        """Remove the directory, whose lock is held, and the user's if it was the last."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.directory.parent.rmdir()


def sweep() -> None:
    """Remove the directories that killed keepers have left and nobody uses."""
    with contextlib.suppress(FileNotFoundError):
        for directory in _user_directory().iterdir():
            with contextlib.suppress(OSError):
                _sweep_one(Place(directory))


def _sweep_one(place: Place) -> None:
    lock = place.try_lock()
    if lock is None:
        return
    try:
        connection = place.connect()
        if connection is None:
            place.remove()
        else:
            connection.close()
    finally:
        lock.release()


def _user_directory() -> Path:
    root = tempfile.gettempdir()
    if len(root.encode()) > _LONGEST_TEMPORARY_ROOT:
        root = "/tmp"  # noqa: S108 - what is made there is checked to be ours
    return Path(root) / f"tokentape-{os.getuid()}"


def _make_private(directory: Path) -> None:
    """Make `directory` for this user alone. Raises `StartFailed` where it is there and somebody else's."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartFailed(f"{directory} is not a directory of this user alone (mode 0700); remove it, or set TMPDIR")
