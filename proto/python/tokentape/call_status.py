"""How calls end: gRPC's code with some words, and those ends that a client and a sidecar both give."""

from __future__ import annotations

from typing import TypeAlias, cast

import grpc

Status: TypeAlias = tuple[grpc.StatusCode, str]
"""How a call ended, and in what words."""

LATE: Status = (grpc.StatusCode.DEADLINE_EXCEEDED, "the call took longer than its timeout")
LEFT: Status = (grpc.StatusCode.CANCELLED, "the client has left this call")

_CODES: dict[int, grpc.StatusCode] = {cast("int", code.value[0]): code for code in grpc.StatusCode}


def status_code(number: int) -> grpc.StatusCode:
    """Return gRPC's code of this number; UNKNOWN for any other."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)
