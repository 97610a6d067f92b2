"""The standard health and reflection services, and the address that they are served at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.engines import ManualEngine
from support.refusals import refused
from support.scripted import RunningSidecar, call, scripted_sidecar, sidecar_on, tokens
from support.waiting import eventually
from tokentape.listen import ListenAddress
from tokentape_sidecar.errors import EngineDead
from tokentape_sidecar.listener import AddressInUse, Listener
from tokentape_sidecar.server import GENERATION_SERVICE, TAPE_SERVICE, Sidecar

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ["", "tokentape.v1.GenerationService", "tokentape.v1.TapeService"]


def watch(running: RunningSidecar, service: str) -> AsyncIterator[health_pb2.HealthCheckResponse]:
    return aiter(running.client.health.Watch(health_pb2.HealthCheckRequest(service=service)))


async def status_of(updates: AsyncIterator[health_pb2.HealthCheckResponse]) -> int:
    async with asyncio.timeout(5):
        return (await anext(updates)).status


def test_the_services_have_their_published_names() -> None:
    assert SERVICES[1:] == [GENERATION_SERVICE, TAPE_SERVICE]


@pytest.mark.parametrize("service", SERVICES)
async def test_a_sidecar_that_serves_says_so_D12(service: str) -> None:
    async with scripted_sidecar() as running:
        assert await running.client.health_of(service) == SERVING
        assert await status_of(watch(running, service)) == SERVING


async def test_an_unknown_service_is_not_found_D12() -> None:
    async with scripted_sidecar() as running:
        with refused(grpc.StatusCode.NOT_FOUND, ""):
            await running.client.health_of("tokentape.v1.Nothing")
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert await status_of(watch(running, "tokentape.v1.Nothing")) == unknown


async def test_a_dead_engine_turns_health_for_those_who_watch_and_those_who_ask_D12() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        watches = [watch(running, service) for service in SERVICES]
        assert [await status_of(updates) for updates in watches] == [SERVING] * 3
        engine.die(EngineDead("the engine died"))
        assert [await status_of(updates) for updates in watches] == [NOT_SERVING] * 3
        assert [await running.client.health_of(service) for service in SERVICES] == [NOT_SERVING] * 3


async def test_a_sidecar_that_drains_says_so_while_its_calls_finish_D12() -> None:
    slow = call(tokens(10), tokens(11, delay_ms=300, finish="stop"))
    async with scripted_sidecar(slow) as running:
        updates = watch(running, "")
        assert await status_of(updates) == SERVING
        generation = asyncio.create_task(running.client.generate())
        await eventually(lambda: running.sidecar.running_call_count)
        stopping = asyncio.create_task(running.sidecar.stop(grace_seconds=10))
        assert await status_of(updates) == NOT_SERVING
        assert [await running.client.health_of(service) for service in SERVICES] == [NOT_SERVING] * 3
        with refused(grpc.StatusCode.UNAVAILABLE, "shutting down"):
            await running.client.generate()
        assert (await generation).token_ids() == [10, 11]
        await stopping


async def test_reflection_lists_every_service_and_describes_ours_D12() -> None:
    async with scripted_sidecar() as running:
        channel: Any = running.client.channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers: list[Any] = [
            answer
            async for answer in stub.ServerReflectionInfo(
                iter(
                    [
                        reflection_pb2.ServerReflectionRequest(list_services=""),
                        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[1]),
                    ]
                )
            )
        ]
    assert {service.name for service in answers[0].list_services_response.service} == {
        *SERVICES[1:],
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert answers[1].file_descriptor_response.file_descriptor_proto


async def test_a_port_is_never_shared() -> None:
    """gRPC's servers would share it silently."""
    async with scripted_sidecar() as running:
        listen = ListenAddress.parse(running.sidecar.address)
        with pytest.raises(AddressInUse, match=f"cannot listen on {listen}: the address is in use"):
            await Sidecar.start(ManualEngine(), data=Listener(listen), name="other")
        assert await running.client.health_of() == SERVING
