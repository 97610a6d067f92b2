"""Who is let in: bearer tokens, for all services of a listener but health, which probes ask without one.

A stream of calls may stay open for days. Its token is looked at again with each call that it begins
(`check_still_let_in`): a token that was taken out of the file begins no more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from tokentape.secret_file import SecretFile
from tokentape_sidecar.errors import Unauthenticated
from tokentape_sidecar.interceptors import Context, Continuation, Handler, metadata_of

_OPEN_METHODS = "/grpc.health.v1."
_SCHEME = "bearer"
_is_still_let_in: ContextVar[Callable[[], bool]] = ContextVar("is_still_let_in", default=lambda: True)


class TokenGate(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls that show no token, before anything of their request is read."""

    def __init__(self, tokens: SecretFile, option: str) -> None:
        """Let in who shows one of `tokens`, which were given as `option`."""
        self._tokens = tokens
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(_refusing(option))

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler, or one that refuses (see `grpc.aio.ServerInterceptor`)."""
        if handler_call_details.method.startswith(_OPEN_METHODS):
            return await continuation(handler_call_details)
        token = _shown_token(handler_call_details)
        if not self._tokens.accept(token):
            return self._refusal
        _is_still_let_in.set(lambda: self._tokens.accept(token))
        return await continuation(handler_call_details)


def check_still_let_in() -> None:
    """Raise `Unauthenticated` where the token that the gRPC call which is served has shown is no longer one."""
    if not _is_still_let_in.get()():
        raise Unauthenticated("the token that this stream was opened with is no longer one: open another")


def _shown_token(details: grpc.HandlerCallDetails) -> bytes:
    """Return the token of a call; empty where it shows none, or several."""
    shown = [value for key, value in metadata_of(details) if key == "authorization"]
    if len(shown) != 1:
        return b""
    scheme, _, token = str(shown[0]).partition(" ")
    return token.strip().encode(errors="replace") if scheme.lower() == _SCHEME else b""


def _refusing(option: str) -> Any:
    async def refuse(_requests: object, context: Context) -> AsyncIterator[Any]:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"no token, or a wrong one: send the metadata authorization: Bearer TOKEN, with one of {option}",
        )
        yield

    return refuse
