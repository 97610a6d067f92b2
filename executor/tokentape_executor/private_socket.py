"""A Unix socket for a sidecar of one's own: agents may share this machine's loopback, and shall not find it there."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from tokentape.listen import UnixAddress

_LONGEST_TEMPORARY_ROOT = 70
"""A Unix socket's path may have 107 bytes; 27 are ours."""


class PrivateSocket:
    """A place for a socket, in a directory that only this user can enter."""

    def __init__(self) -> None:
        """Make the directory."""
        directory = Path(tempfile.mkdtemp(prefix="tokentape-", dir=_temporary_root()))
        self.address = UnixAddress(directory / "sidecar")
        """Where to listen."""
        self._finalizer = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def remove(self) -> None:
        """Remove the directory; so do the end of this object and that of the interpreter. Again does nothing."""
        self._finalizer()


def _temporary_root() -> str:
    root = tempfile.gettempdir()
    return root if len(root.encode()) <= _LONGEST_TEMPORARY_ROOT else "/tmp"  # noqa: S108 - made for this user alone
