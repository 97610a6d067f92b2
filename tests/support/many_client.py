"""The client of `GenerateMany` for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from support.scripted import RunningSidecar
from support.sidecar_client import Generated, read_to_end
from tokentape.many_calls import ManyCalls
from tokentape.running_call import RunningCall
from tokentape.v1.generation_pb2 import GenerateRequest


@asynccontextmanager
async def calling(running: RunningSidecar) -> AsyncGenerator[ManyCalls]:
    """Many calls to a sidecar, closed on leaving."""
    many = ManyCalls(running.client.channel)
    try:
        yield many
    finally:
        await many.close()


def request(**fields: Any) -> GenerateRequest:
    """A call of some prompt, where `fields` names none."""
    given: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], **fields}
    return GenerateRequest(**given)


async def read(running_call: RunningCall) -> Generated:
    """Read a call's events to their end."""
    return await read_to_end(running_call.events())
