"""A channel whose every call shows a bearer token.

Not by gRPC's own means: call credentials want TLS, also on loopback, and an interceptor costs a task for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio

from tokentape.secret_file import SecretFile


class TokenChannel(grpc.aio.Channel):
    """Another channel, each of whose calls carries `authorization: Bearer TOKEN`."""

    def __init__(self, channel: grpc.aio.Channel, tokens: SecretFile) -> None:
        """Make the calls on `channel`, which is closed with this one, with the first of `tokens` as it is then."""
        self._channel = channel
        self._tokens = tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See `grpc.aio.Channel`."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`."""
        await self._channel.channel_ready()

    def unary_unary(self, *method: Any, **more: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._showing(self._channel.unary_unary(*method, **more))

    def unary_stream(self, *method: Any, **more: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._showing(self._channel.unary_stream(*method, **more))

    def stream_unary(self, *method: Any, **more: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._showing(self._channel.stream_unary(*method, **more))

    def stream_stream(self, *method: Any, **more: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._showing(self._channel.stream_stream(*method, **more))

    def _showing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*request: Any, metadata: Any = None, **more: Any) -> Any:
            token = ("authorization", f"Bearer {self._tokens.show()}")
            return method(*request, metadata=[*(metadata or ()), token], **more)

        return call
