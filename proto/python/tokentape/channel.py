"""The one way to dial a sidecar.

`dial` sets what gRPC's defaults get wrong here: 4 MiB messages (a long prompt is larger), an HTTP proxy taken from the
environment even for loopback, dead peers that are never noticed, and a back-off after a restart of up to two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import grpc
import grpc.aio

from tokentape.access import OPEN, Access, UnusableAccess
from tokentape.forks import use_grpc
from tokentape.keepalive import DEFAULT_KEEPALIVE, Keepalive
from tokentape.listen import is_unix, parse_address
from tokentape.secret_file import SecretFile, UnusableSecretFile, reason_of
from tokentape.token_channel import TokenChannel

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that either side takes, in bytes; the sidecar's own limit is the same."""

MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""Options that both ends set alike."""

_DIAL_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # How long it may take to connect, TLS included. One that is refused is tried again after the initial backoff.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Channels to one address do not share a connection, so that closing one never disturbs another.
    ("grpc.use_local_subchannel_pool", 1),
)


def dial(address: str, access: Access = OPEN, *, keepalive: Keepalive = DEFAULT_KEEPALIVE) -> grpc.aio.Channel:
    """Return a channel to the sidecar at `address` (`host:port` or `unix:/path`), which lets in those with `access`.

    Nothing is connected before the first call. The channel belongs to the running event loop; close it there. The token
    is read again whenever its file changes, the certificates are those of now.

    Raises `UnusableAccess` where a file cannot be used, or `address` is none for the token (see `check_access`);
    `UsedBeforeForkError` in a process that was forked from one that uses gRPC; `RuntimeError` where no event loop runs.
    """
    _check_running_loop()
    use_grpc()
    check_access(address, access)
    tokens = _tokens(access)
    options = [*_DIAL_OPTIONS, *keepalive.channel_options()]
    credentials = None if is_unix(address) else _credentials(access)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return channel if tokens is None else TokenChannel(channel, tokens)


def _check_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "dial a sidecar inside a coroutine: a channel belongs to the event loop that runs when it is made"
        ) from None


def check_access(address: str, access: Access) -> None:
    """Raise `UnusableAccess` where the token of `access` would cross a network in the clear on its way to `address`."""
    if access.token_file is not None and access.ca_file is None and _is_public(address):
        raise UnusableAccess(
            f"{address}: the token of --sidecar-token-file would go there in the clear: give --sidecar-ca, for TLS"
        )


def check_files(access: Access) -> None:
    """Raise what `dial` would where a file of `access` cannot be used."""
    _tokens(access)
    _credentials(access)


def _tokens(access: Access) -> SecretFile | None:
    try:
        return None if access.token_file is None else SecretFile(access.token_file, "--sidecar-token-file")
    except UnusableSecretFile as error:
        raise UnusableAccess(str(error)) from error


def _is_public(address: str) -> bool:
    try:
        return parse_address(address).is_public
    except argparse.ArgumentTypeError:
        return True


def _credentials(access: Access) -> grpc.ChannelCredentials | None:
    if access.ca_file is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read("--sidecar-ca", access.ca_file),
        private_key=_read("--sidecar-key", access.key_file),
        certificate_chain=_read("--sidecar-certificate", access.certificate_file),
    )


def _read(option: str, file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise UnusableAccess(f"{option} {file} cannot be used: {reason_of(error)}") from error
