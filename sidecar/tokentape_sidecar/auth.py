"""Who is let in: bearer tokens, for all services of a listener but health, which probes ask without one.

A stream of requests is asked for its token again with each of them: one that stays open for days takes no new call for
who is not let in any more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from tokentape.secret_file import SecretFile
from tokentape_sidecar.interceptors import Context, Continuation, Handler, metadata_of, rewrap

_OPEN_METHODS = "/grpc.health.v1."
_SCHEME = "bearer"


class TokenGate(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls that show no token, before anything of their request is read."""

    def __init__(self, tokens: SecretFile, option: str) -> None:
        """Let in who shows one of `tokens`, which were given as `option`."""
        self._tokens = tokens
        self._option = option

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler, or one that refuses (see `grpc.aio.ServerInterceptor`)."""
        if handler_call_details.method.startswith(_OPEN_METHODS):
            return await continuation(handler_call_details)
        token = _shown_token(handler_call_details)
        if not self._tokens.accept(token):
            return grpc.stream_stream_rpc_method_handler(self._refuse)
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:
            return handler
        # All that take a stream answer by one.
        return rewrap(handler, unary=_as_it_is, stream=lambda method: self._asking_again(method, token))

    def _asking_again(self, method: Callable[[Any, Context], AsyncGenerator[Any]], token: bytes) -> Callable[..., Any]:
        async def accepted(requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
            async for request in requests:
                if not self._tokens.accept(token):
                    await self._abort(context)
                yield request

        async def answer(requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
            async with aclosing(method(accepted(requests, context), context)) as responses:
                async for response in responses:
                    yield response

        return answer

    async def _refuse(self, _requests: object, context: Context) -> None:
        await self._abort(context)

    async def _abort(self, context: Context) -> NoReturn:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"no token, or a wrong one: send the metadata authorization: Bearer TOKEN, with one of {self._option}",
        )


def _as_it_is(method: Any) -> Any:
    return method


def _shown_token(details: grpc.HandlerCallDetails) -> bytes:
    """Return the token of a call; empty where it shows none, or several."""
    shown = [value for key, value in metadata_of(details) if key == "authorization"]
    if len(shown) != 1:
        return b""
    scheme, _, token = str(shown[0]).partition(" ")
    return token.strip().encode(errors="replace") if scheme.lower() == _SCHEME else b""
