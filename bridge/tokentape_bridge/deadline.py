"""How long a request may take: `--request-timeout`, or less by its header `x-request-timeout`, in seconds.

What is left of it goes with the request's calls to sidecars: as their `timeout` in `GenerateMany`, as the gRPC
deadline of `FindCalls`. So the engine's work ends when it has passed, whether or not the bridge still does anything.
The client then gets status 504, or in a stream the error's frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Generator
from contextvars import ContextVar
from dataclasses import dataclass

import grpc
import grpc.aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentape_bridge.errors import ApiError, respond

HEADER = "x-request-timeout"
"""How a request says how long it may take: a number of seconds above 0."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request's time."""

    at: float
    """On the event loop's clock."""
    seconds: float
    """The time from the request's head on."""

    def remaining(self) -> float:
        """Return how many seconds are left; not below 0."""
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def passed(self) -> ApiError:
        """Return the error of a request whose time is over."""
        return ApiError(
            f"the request took longer than the {self.seconds:g} s that it may (the bridge's --request-timeout, or the "
            f"request's header {HEADER})",
            code="deadline_exceeded",
            status=504,
            error_type="timeout",
        )


_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def seconds_left() -> float | None:
    """Return how many seconds the request that is served has left; `None`: it may take as long as it needs."""
    deadline = _current.get()
    return None if deadline is None else deadline.remaining()


@contextlib.contextmanager
def statuses_translated() -> Generator[None]:
    """Raise the `ApiError` of a passed deadline where a call to a sidecar, with `seconds_left`, ends by it."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        deadline = _current.get()
        if deadline is None or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise deadline.passed() from None


@contextlib.asynccontextmanager
async def within_deadline() -> AsyncGenerator[None]:
    """End what is awaited within when the request's time is over, by the `ApiError` of that."""
    deadline = _current.get()
    try:
        async with asyncio.timeout_at(None if deadline is None else deadline.at):
            yield
    except TimeoutError:
        if deadline is None:
            raise
        raise deadline.passed() from None


class Deadlines:
    """ASGI middleware that gives each request its deadline."""

    def __init__(self, app: ASGIApp, default_seconds: float | None) -> None:
        """Serve `app`; a request may take `default_seconds`, and ask for less. `None`: it may ask for any time."""
        self._app = app
        self._default_seconds = default_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            try:
                _current.set(self._deadline(Headers(scope=scope).get(HEADER)))
            except ApiError as error:
                await respond(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _deadline(self, asked: str | None) -> Deadline | None:
        times = [seconds for seconds in (self._default_seconds, _seconds(asked)) if seconds is not None]
        if not times:
            return None
        return Deadline(asyncio.get_running_loop().time() + min(times), min(times))


def _seconds(text: str | None) -> float | None:
    """Return what a request's header says. Raises `ApiError` where it is no number of seconds above 0."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(f"{HEADER}: must be a number of seconds above 0", param=HEADER, code="invalid_value")
    return seconds
