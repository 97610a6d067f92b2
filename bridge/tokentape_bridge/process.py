"""What the processes of the bridge do before they serve."""

from __future__ import annotations

import os
import resource
import socket
import sys

from tokentape.access import UnusableAccess
from tokentape.channel import check_access, check_files
from tokentape.listen import ListenAddress
from tokentape.logs import configure_logging
from tokentape.secret_file import SecretFile, UnusableSecretFile
from tokentape.tls import UnusableCertificate
from tokentape_bridge.settings import Settings

BACKLOG = 2048
"""How many connections may wait to be accepted."""


class CannotServeError(Exception):
    """What the command line asks for is not to be had; the message says what."""


def prepare(settings: Settings) -> None:
    """Set up logging, the imports that are to come, and the limit on connections."""
    configure_logging(settings.log_level, settings.log_format)
    # transformers imports torch wherever it is installed: 3 s and 200 MB for a tokenizer that uses none of it.
    # It then advises to install it, at the level of warnings.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType] # None is Python's way to bar an import
    _allow_many_connections()


def bind(address: ListenAddress) -> socket.socket:
    """Return a socket that listens at `address`. Raises `CannotServeError` when that is taken or not this host's."""
    host, port = address.host, address.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # Python appends the address to the system's words; a failed look-up of the host has words of its own.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise CannotServeError(f"cannot listen at {address}: {reason}") from error
    # Its connections have it too. asyncio sees to it only where a socket's maker named the protocol; without it a frame
    # waits until the client has acknowledged the one before, which a client may put off for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def read_keys(settings: Settings) -> SecretFile | None:
    """Return the keys that open the bridge, if it has any. Raises `CannotServeError` where their file has none."""
    file = settings.http.api_key_file
    if file is None:
        return None
    try:
        return SecretFile(file, "--api-key-file")
    except UnusableSecretFile as error:
        raise CannotServeError(str(error)) from error


def check(settings: Settings) -> None:
    """Raise `CannotServeError` where a file of keys, tokens or certificates cannot be used, or not as told."""
    read_keys(settings)
    try:
        check_files(settings.access)
        for address in settings.sidecars.values():
            check_access(address, settings.access)
        if settings.http.tls is not None:
            settings.http.tls.context()
    except (UnusableAccess, UnusableCertificate) as error:
        raise CannotServeError(str(error)) from error


def _allow_many_connections() -> None:
    """Raise the limit on open files as far as the system lets it: every connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
