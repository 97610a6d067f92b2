"""What a client sees of a refused call."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

import grpc
import grpc.aio
import pytest


@contextmanager
def refused(status: grpc.StatusCode, message: str) -> Generator[None]:
    """Expect a gRPC call to end with `status` and a message in which the pattern `message` occurs."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is status, caught.value
    assert re.search(message, caught.value.details() or ""), caught.value
