"""How a silent connection is known to be alive: both ends of every gRPC connection of ours ping, alike.

Silence is normal: nothing comes while a long prompt is computed, and a watcher of a quiet tape may wait for an hour.
gRPC would ping twice in a silence, then once a minute, and wait a minute for each answer; so each of these has to be
said.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keepalive:
    """A peer that is gone without a word is noticed `seconds + timeout_seconds` after its last sign, at the latest."""

    seconds: float = 20.0
    """How long a connection with calls on it may be silent before it is pinged."""
    timeout_seconds: float = 10.0
    """How long a ping may take to be answered."""

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the options of either end."""
        return [
            ("grpc.keepalive_time_ms", round(self.seconds * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.timeout_seconds * 1000)),
            # What bounds a ping's answer, whatever keepalive's own time is.
            ("grpc.http2.ping_timeout_ms", round(self.timeout_seconds * 1000)),
            # No bound: the pings of a silence do not become rare.
            ("grpc.http2.max_pings_without_data", 0),
        ]


DEFAULT_KEEPALIVE = Keepalive()
"""What holds where nobody says otherwise."""
