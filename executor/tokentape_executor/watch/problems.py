"""What went wrong at a sidecar, in one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

from tokentape_executor.errors import RolloutError

_WORDS: dict[grpc.StatusCode, Callable[[str, str], str]] = {
    grpc.StatusCode.PERMISSION_DENIED: lambda tape, at: f"the reader token in the file is not that of {tape} at {at}",
    grpc.StatusCode.NOT_FOUND: lambda tape, at: (
        f"the sidecar at {at} has no tape {tape}: it was deleted, nobody used it for its time to live, or the sidecar "
        "was started again"
    ),
    grpc.StatusCode.UNAVAILABLE: lambda tape, at: (
        f"no sidecar answers at {at}: is it running? --sidecar ADDRESS says where else {tape} is"
    ),
    grpc.StatusCode.UNAUTHENTICATED: lambda _, at: (
        f"the sidecar at {at} asks for a token of its own: --sidecar-token-file FILE"
    ),
    grpc.StatusCode.FAILED_PRECONDITION: lambda tape, at: (
        f"the sidecar at {at} cannot give the text of {tape}: --ids instead shows its ids"
    ),
    grpc.StatusCode.OUT_OF_RANGE: lambda tape, _: f"--from: {tape} has no such sequence number yet",
}


def explain(error: RolloutError, tape_id: str, address: str) -> str:
    """Return what `error`, which watching a tape raised, means."""
    cause = error.__cause__
    words = _WORDS.get(cause.code()) if isinstance(cause, grpc.aio.AioRpcError) else None
    if words is None:
        return str(error)
    details = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else ""
    return f"{words(tape_id, address)} ({details})"
