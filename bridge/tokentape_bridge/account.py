"""What one HTTP request has done so far, for its line in the log and the metrics.

The middleware that opens an account need not know the routes, and whoever makes a call for the request need not be
handed the account: it is a context variable, so every task that works for the request has it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio

from tokentape.choice_columns import TokenRun
from tokentape.running_call import RunningCall
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateRequest, GenerateResponse
from tokentape.v1.types_pb2 import Completion
from tokentape_bridge import metrics


@dataclass(slots=True)
class Account:
    """One request's calls to sidecars, added up."""

    sidecar: str = ""
    """The name of the sidecar that serves it; empty: none yet."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


_current: ContextVar[Account | None] = ContextVar("account", default=None)


@contextlib.contextmanager
def opened() -> Generator[Account]:
    """Open the account of the request that is served within."""
    account = Account()
    token = _current.set(account)
    try:
        yield account
    finally:
        _current.reset(token)


_TOKENS_AT_ONCE = 32
"""How many tokens of a call are put into the metrics together: each time takes a lock, or a write into a file."""


class CallMeter:
    """Counts one call, and its tokens as they come. It is a context manager around the call.

    They are in the metrics, and in the account of the request that the call is for, if any.
    """

    def __init__(self, sidecar: str, model: str, request: GenerateRequest) -> None:
        """`sidecar` and `model` are the names of who serves the call."""
        self._request = request
        self._account = _current.get() or Account()
        self._account.sidecar = sidecar
        self._prompt_tokens = metrics.PROMPT_TOKENS.labels(model)
        self._generation_tokens = metrics.GENERATION_TOKENS.labels(model)
        self._first_token = metrics.FIRST_TOKEN.labels(model)
        self._began = time.monotonic()
        self._sidecar = sidecar
        self._open_choices = request.sampling.n or 1
        self._is_first = True
        self._uncounted = 0

    def __enter__(self) -> Self:
        metrics.CALLS_RUNNING.labels(self._sidecar).inc()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._count_tokens()
        metrics.CALLS_RUNNING.labels(self._sidecar).dec()
        metrics.CALLS.labels(self._sidecar, self._code(error).name).inc()

    def _count_tokens(self) -> None:
        self._generation_tokens.inc(self._uncounted)
        self._uncounted = 0

    def _code(self, error: BaseException | None) -> grpc.StatusCode:
        if isinstance(error, grpc.aio.AioRpcError):
            return error.code()
        # Whoever reads leaves when all is there, or before.
        return grpc.StatusCode.CANCELLED if error is not None and self._open_choices > 0 else grpc.StatusCode.OK

    def count_started(self, started: GenerateResponse.Started) -> None:
        """Take that the call was accepted."""
        self._account.prompt_tokens += started.prompt_token_count
        self._prompt_tokens.inc(started.prompt_token_count)
        if self._request.tape_id:
            metrics.TAPE_CALLS.labels(*_prefix(self._request)).inc()

    def count(self, news: Sequence[TokenRun | Completion], call: RunningCall) -> None:
        """Take what is new of the call."""
        tokens = 0
        for new in news:
            if isinstance(new, TokenRun):
                tokens += len(new.token_ids)
            else:
                self._open_choices -= 1
        if tokens:
            self._account.completion_tokens += tokens
            self._uncounted += tokens
            if self._uncounted >= _TOKENS_AT_ONCE:
                self._count_tokens()
            if self._is_first and (first_token_at := call.first_token_at) is not None:
                self._is_first = False
                self._first_token.observe(first_token_at - self._began)


def _prefix(request: GenerateRequest) -> tuple[str, str]:
    """Return what became of the prefix and, for a new one, why; in the words of the answer's `tokentape` object."""
    if request.HasField("parent"):
        return "kept", ""
    return "new", types_pb2.SplitCause.Name(request.split_cause).removeprefix("SPLIT_CAUSE_").lower()
