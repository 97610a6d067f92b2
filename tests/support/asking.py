"""Asking a sidecar the simplest question."""

from __future__ import annotations

from tokentape.access import OPEN, Access
from tokentape.channel import dial
from tokentape.v1 import generation_pb2, generation_pb2_grpc


async def model_name(address: str, access: Access = OPEN) -> str:
    """Return the name of the model that the sidecar at `address` serves to those with `access`."""
    async with dial(address, access) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return (await stub.GetModel(generation_pb2.GetModelRequest(), timeout=10)).name
