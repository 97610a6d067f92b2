"""A policy that a running sidecar serves, for agents anywhere: its bridge is given, or started here."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from tokentape.access import OPEN, Access
from tokentape.channel import dial
from tokentape.v1 import generation_pb2, generation_pb2_grpc
from tokentape_executor.errors import from_rpc_error
from tokentape_executor.node import NodeMember, NodePolicy, NodeSpec
from tokentape_executor.policy import Policy
from tokentape_executor.rollout_client import NO_KEY
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeClient

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _GivenBridge:
    """A policy behind a bridge that somebody else runs."""

    tapes: TapeClient
    model_name: str
    url: str
    api_key: str = field(repr=False)

    async def bridge_url(self) -> str:
        return self.url


@contextlib.asynccontextmanager
async def open_policy(
    sidecar: str,
    *,
    bridge: str | None = None,
    api_key: str = NO_KEY,
    settings: ExecutorSettings | None = None,
    access: Access = OPEN,
) -> AsyncGenerator[Policy]:
    """Connect to the sidecar at `sidecar`; yield the policy, for rollouts on the running event loop.

    `sidecar` is `HOST:PORT` or `unix:/PATH`, and lets in those with `access`. `bridge` is the base URL
    (`http://HOST:PORT/v1`) of a bridge that routes to it, `api_key` one of the keys of its `--api-key-file`; `None`
    starts one, with the same access, which the group of the settings (by default those of the environment) shares on
    this machine.

    Raises `ValueError` where `bridge` is no such URL or `access` cannot be used, `SidecarUnavailable` where no sidecar
    answers, `RolloutRefused` where it lets in nobody with this token, `StartFailed` where the bridge does not start.
    """
    if bridge is not None and not bridge.startswith(("http://", "https://")):
        raise ValueError(f"bridge: {bridge!r} is not a URL, as in http://127.0.0.1:8000/v1")
    settings = settings or ExecutorSettings.from_environment()
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(dial(sidecar, access))
        model = await _model(channel, sidecar)
        tapes = TapeClient(channel, model.sidecar_name, time_to_live_seconds=settings.tape_time_to_live_seconds)
        if bridge is not None:
            yield _GivenBridge(tapes, model.name, bridge, api_key)
            return
        group = settings.node_group or f"policy-{secrets.token_hex(8)}"
        spec = NodeSpec.from_settings(settings, group=group, policy_model_name=None, access=access)
        member = await NodeMember.join(spec, {model.sidecar_name: sidecar})
        stack.push_async_callback(asyncio.to_thread, member.leave)
        yield NodePolicy(tapes, model.name, member)


async def _model(channel: grpc.aio.Channel, sidecar: str) -> generation_pb2.GetModelResponse:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    try:
        return await stub.GetModel(generation_pb2.GetModelRequest(), timeout=_ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(f"asking the sidecar at {sidecar} for its model", error) from error
