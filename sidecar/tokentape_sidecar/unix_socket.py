"""Unix sockets to listen on: never taken from a process that serves there, and private where they must be.

gRPC binds a Unix socket by deleting what is at its path, whoever listens there. So whoever binds one holds a lock on
its directory meanwhile, and looks first whether anybody answers.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tokentape.listen import MAX_UNIX_PATH_BYTES
from tokentape_sidecar.listener import AddressInUse

_PRIVATE_DIRECTORY = 0o700
_OTHERS = 0o077


def check_unserved(path: Path) -> None:
    """Raise `AddressInUse` where a process serves at `path`; a socket that a killed one has left there is nobody's."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            # Nobody takes the connections that queue there, which says nothing of who listens.
            pass
        except OSError as error:
            raise AddressInUse(f"cannot listen on unix:{path}: {error.strerror}") from None
        raise AddressInUse(f"cannot listen on unix:{path}: another process serves there")


@contextmanager
def claimed(path: Path) -> Generator[None]:
    """Let nobody else bind `path` meanwhile. Raises `AddressInUse` where somebody serves there, or nobody can."""
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise AddressInUse(f"cannot listen on unix:{path}: a socket's path has {MAX_UNIX_PATH_BYTES} bytes at most")
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise AddressInUse(f"cannot listen on unix:{path}: {path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        check_unserved(path)
        yield
    finally:
        os.close(directory)


def make_private_directory(directory: Path) -> None:
    """Make a directory that only this user can enter, or see that it is one. Raises `AddressInUse` where it is not."""
    try:
        directory.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise AddressInUse(f"cannot make the directory {directory} for a socket: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise AddressInUse(f"{directory} is not a directory of this user: a socket in it could be somebody else's")
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise AddressInUse(
            f"{directory} lets others in (mode {mode:o}): the control socket needs a directory of mode 700"
        )
