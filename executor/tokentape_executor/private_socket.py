"""A Unix socket for a sidecar of one's own: agents may share this machine's loopback, and shall not find it there."""

from __future__ import annotations

import tempfile
import weakref

from tokentape import held_directory
from tokentape.held_directory import HeldDirectory
from tokentape.listen import UnixAddress

_PREFIX = "tokentape-sidecar-"
_LONGEST_TEMPORARY_ROOT = 65
"""A Unix socket's path may have 107 bytes; 42 are ours at most."""


class PrivateSocket:
    """A place for a socket, in a directory that only this user can enter."""

    def __init__(self) -> None:
        """Make the directory."""
        held = HeldDirectory.make(_PREFIX, _temporary_root())
        # One of its own, since whoever binds a socket takes the lock of the socket's directory.
        inner = held.path / "socket"
        inner.mkdir(mode=0o700)
        self.address = UnixAddress(inner / "sidecar")
        """Where to listen."""
        self._finalizer = weakref.finalize(self, held.remove)

    def remove(self) -> None:
        """Remove the directory; so do the end of this object and that of the interpreter. Again does nothing."""
        self._finalizer()


def sweep() -> None:
    """Remove the directories that killed processes of this user have left."""
    held_directory.sweep(_PREFIX, _temporary_root())


def _temporary_root() -> str:
    root = tempfile.gettempdir()
    return root if len(root.encode()) <= _LONGEST_TEMPORARY_ROOT else "/tmp"  # noqa: S108 - made for this user alone
