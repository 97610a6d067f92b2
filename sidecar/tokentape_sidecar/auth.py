"""Who is let in: bearer tokens, for all services of a listener but health, which probes ask without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tokentape.secret_file import SecretFile
from tokentape_sidecar.interceptors import Context, Continuation, Handler, metadata_of

_OPEN_METHODS = "/grpc.health.v1."
_SCHEME = "bearer"


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
        is_open = handler_call_details.method.startswith(_OPEN_METHODS)
        if is_open or self._tokens.accept(_shown_token(handler_call_details)):
            return await continuation(handler_call_details)
        return self._refusal


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
