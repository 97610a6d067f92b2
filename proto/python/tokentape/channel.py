"""The one way to dial a sidecar.

`dial` sets what gRPC's defaults get wrong here: 4 MiB messages (a long prompt is larger), an HTTP proxy taken from the
environment even for loopback, dead peers that are never noticed, and a back-off after a restart of up to two minutes.
"""

from __future__ import annotations

import grpc
import grpc.aio

from tokentape.access import OPEN, Access

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that either side takes, in bytes; the sidecar's own limit is the same."""

KEEPALIVE_SECONDS = 20
"""How often an idle connection with calls on it is pinged. The sidecar allows twice that often."""

MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""Options that both ends set alike."""

_DIAL_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Channels to one address do not share a connection, so that closing one never disturbs another.
    ("grpc.use_local_subchannel_pool", 1),
)


def dial(address: str, access: Access = OPEN) -> grpc.aio.Channel:
    """Return a channel to the sidecar at `address` (`host:port` or `unix:/path`), which lets in those with `access`.

    Nothing is connected before the first call. The channel belongs to the running event loop; close it there.
    """
    return grpc.aio.insecure_channel(address, options=_DIAL_OPTIONS)
