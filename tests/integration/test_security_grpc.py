"""Who gets into a sidecar, and who does not: tokens, in files that change while it serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.asking import model_name
from support.certificates import secret_file
from support.engines import ManualEngine
from support.guarded import guarded_sidecar
from support.refusals import refused
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.access import Access, UnusableAccess
from tokentape.channel import dial
from tokentape.listen import UnixAddress
from tokentape.v1 import control_pb2, generation_pb2, tape_pb2
from tokentape_sidecar.server import Sidecar

Status = grpc.StatusCode

DATA, CONTROL = "the-data-token", "the-control-token"
SERVICES = [
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    tape_pb2.DESCRIPTOR.services_by_name["TapeService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
]
METHODS: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]


@dataclass(frozen=True, slots=True)
class Guarded:
    """A sidecar with both its tokens, and the files that hold them."""

    sidecar: Sidecar
    engine: ManualEngine
    data_file: Path
    control_file: Path


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncGenerator[Guarded]:
    engine = ManualEngine()
    data, control = secret_file(tmp_path / "data", DATA), secret_file(tmp_path / "control", CONTROL)
    async with guarded_sidecar(engine, token_file=data, control_token_file=control) as sidecar:
        yield Guarded(sidecar, engine, data, control)


async def ask(channel: grpc.aio.Channel, method: MethodDescriptor, **more: Any) -> None:
    """Call any method of ours with an empty request."""
    make: Callable[..., Any] = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(GetMessageClass(method.input_type)(), timeout=10, **more)
    if method.server_streaming:
        async for _ in call:
            pass
    else:
        await call


def address_of(guarded: Guarded, method: MethodDescriptor) -> str:
    control = guarded.sidecar.control_address
    assert control is not None
    return control if method.containing_service.name == "ControlService" else guarded.sidecar.address


def shown(*values: str) -> list[tuple[str, str]]:
    return [("authorization", value) for value in values]


WRONG = {
    "nothing": [],
    "another": shown("Bearer another"),
    "a part of it": shown(f"Bearer {DATA[:-1]}"),
    "more than it": shown(f"Bearer {DATA}x"),
    "empty": shown("Bearer "),
    "no scheme": shown(DATA),
    "another scheme": shown(f"Basic {DATA}"),
    "two": shown(f"Bearer {DATA}", "Bearer another"),
    "under another name": [("x-api-key", DATA)],
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_every_method_needs_the_token(guarded: Guarded, method: MethodDescriptor) -> None:
    async with grpc.aio.insecure_channel(address_of(guarded, method)) as channel:
        with refused(Status.UNAUTHENTICATED, "no token, or a wrong one"):
            await ask(channel, method)
    assert guarded.engine.submitted == []


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG.keys())
async def test_only_the_token_itself_opens(guarded: Guarded, metadata: list[tuple[str, str]]) -> None:
    method = SERVICES[0].methods_by_name["GetModel"]
    async with grpc.aio.insecure_channel(guarded.sidecar.address) as channel:
        with refused(Status.UNAUTHENTICATED, "--token-file"):
            await ask(channel, method, metadata=metadata)
        await ask(channel, method, metadata=shown(f"bearer  {DATA}"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_the_token_of_the_other_listener_opens_nothing(guarded: Guarded, method: MethodDescriptor) -> None:
    other = DATA if method.containing_service.name == "ControlService" else CONTROL
    async with grpc.aio.insecure_channel(address_of(guarded, method)) as channel:
        with refused(Status.UNAUTHENTICATED, "no token, or a wrong one"):
            await ask(channel, method, metadata=shown(f"Bearer {other}"))


async def test_the_data_listener_has_no_controls(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.sidecar.address) as channel:
        for method in SERVICES[2].methods:
            with refused(Status.UNIMPLEMENTED, ""):
                await ask(channel, method, metadata=shown(f"Bearer {DATA}"))


async def test_reflection_needs_the_token(guarded: Guarded) -> None:
    async def services(metadata: list[tuple[str, str]]) -> list[str]:
        async with grpc.aio.insecure_channel(guarded.sidecar.address) as channel:
            untyped: Any = channel
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(untyped)
            call = stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
            )
            return [each.name async for response in call for each in response.list_services_response.service]

    with refused(Status.UNAUTHENTICATED, "no token"):
        await services([])
    assert "tokentape.v1.TapeService" in await services(shown(f"Bearer {DATA}"))


async def test_health_needs_none(guarded: Guarded) -> None:
    for address in (guarded.sidecar.address, guarded.sidecar.control_address):
        assert address is not None
        async with SidecarClient(address) as client:
            assert await client.health_of() == health_pb2.HealthCheckResponse.SERVING


async def test_an_unknown_method_needs_it_too(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.sidecar.address) as channel:
        with refused(Status.UNAUTHENTICATED, "no token"):
            await channel.unary_unary("/other.Service/Method")(b"")


async def test_a_large_request_without_a_token_is_not_read(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(
        guarded.sidecar.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        # Larger than the limit: it is not that which is told.
        with refused(Status.UNAUTHENTICATED, "no token"):
            await channel.unary_unary("/tokentape.v1.TapeService/OpenTape")(bytes(80 * 2**20), timeout=30)


async def test_a_client_with_access_calls_as_any_other(guarded: Guarded) -> None:
    """Every kind of call, their ends and cancelling, through the channel that shows the token."""
    async with SidecarClient(guarded.sidecar.address, access=Access(guarded.data_file)) as client:
        tape = await client.open_tape()
        call = client.generation.Generate(
            generation_pb2.GenerateRequest(prompt_token_ids=[1, 2], tape_id=tape.tape_id), metadata=[("x-more", "1")]
        )
        events = aiter(call)
        await eventually(lambda: bool(guarded.engine.submitted))
        assert (await anext(events)).started.prompt_token_count == 2
        call.cancel()
        await eventually(lambda: bool(guarded.engine.aborted))
        await client.channel.channel_ready()
        assert client.channel.get_state() is grpc.ChannelConnectivity.READY
        with refused(Status.INVALID_ARGUMENT, "tape_id"):
            await client.tapes.OpenTape(tape_pb2.OpenTapeRequest(tape_id="bad"))


async def test_a_token_is_changed_while_streams_run(guarded: Guarded) -> None:
    """The operator's order: the server takes both, the clients turn to the new one, the server forgets the old."""
    old, new = Access(guarded.data_file.with_name("old")), Access(guarded.data_file.with_name("client"))
    assert old.token_file is not None
    assert new.token_file is not None
    secret_file(old.token_file, DATA)
    secret_file(new.token_file, DATA)
    async with SidecarClient(guarded.sidecar.address, access=new) as client:
        running = asyncio.create_task(client.generate([1, 2, 3]))
        await eventually(lambda: bool(guarded.engine.submitted))
        secret_file(guarded.data_file, "the-next-token", DATA)
        assert await model_name(guarded.sidecar.address, old)
        secret_file(new.token_file, "the-next-token")
        assert (await client.generation.GetModel(generation_pb2.GetModelRequest())).name
        secret_file(guarded.data_file, "the-next-token")
        assert (await client.generation.GetModel(generation_pb2.GetModelRequest())).name
        with refused(Status.UNAUTHENTICATED, "no token"):
            await model_name(guarded.sidecar.address, old)
        guarded.engine.finish(guarded.engine.submitted[0].call_id, 7, 8)
        assert (await running).token_ids() == [7, 8]


@pytest.mark.parametrize("change", ["deleted", "emptied", "unprintable"])
async def test_a_token_file_that_cannot_be_used_changes_nothing(
    guarded: Guarded, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Access(secret_file(tmp_path / "kept", DATA))
    if change == "deleted":
        guarded.data_file.unlink()
    else:
        secret_file(guarded.data_file, *(["é"] if change == "unprintable" else []))
    assert await model_name(guarded.sidecar.address, kept)
    with refused(Status.UNAUTHENTICATED, "no token"):
        await model_name(guarded.sidecar.address)
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"--token-file {guarded.data_file} cannot be used, its secrets stay as they are" in error
    assert "é" not in error


async def test_a_unix_socket_without_a_token_is_for_this_user_alone(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "socket")
    async with guarded_sidecar(ManualEngine(), address=address) as sidecar:
        assert address.path.stat().st_mode & 0o777 == 0o600
        assert await model_name(sidecar.address)


async def test_a_unix_socket_asks_for_its_token(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "token", DATA)
    async with guarded_sidecar(ManualEngine(), token_file=file, address=UnixAddress(tmp_path / "socket")) as sidecar:
        assert await model_name(sidecar.address, Access(file))
        with refused(Status.UNAUTHENTICATED, "no token"):
            await model_name(sidecar.address)


async def test_http_and_nonsense_at_the_grpc_port_leave_it_as_it_is() -> None:
    async with guarded_sidecar(ManualEngine()) as sidecar:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://{sidecar.address}/v1/models")
        host, _, port = sidecar.address.rpartition(":")
        for nonsense in (b"\x00" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000, b"\x16\x03\x01"):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(nonsense)
        assert await model_name(sidecar.address)


async def test_metadata_that_is_no_text_is_refused_and_not_logged(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = guarded.sidecar.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/tokentape.v1.GenerationService/GetModel",
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"authorization": b"Bearer \xff" + DATA.encode(),
    }
    # Literals without a table, which HPACK allows.
    block = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in headers.items())
    writer.write(frame(HEADERS, END_HEADERS, 1, block) + frame(BODY, END_STREAM, 1, bytes(5)))
    try:
        async with asyncio.timeout(10):
            await reader.readuntil(b"no token, or a wrong one")
    finally:
        writer.close()
        await writer.wait_closed()
    lines = [line.getMessage() for line in caplog.records if line.name.startswith("grpc")]
    assert lines == ["a client sent metadata that is no text"]
    assert DATA not in caplog.text
    assert "Traceback" not in caplog.text


BODY, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


async def test_a_token_is_not_sent_over_a_network_in_the_clear(tmp_path: Path) -> None:
    access = Access(secret_file(tmp_path / "token", DATA))
    for address in ("10.0.0.7:50051", "trainer:50051", "[2001:db8::1]:50051", "dns:///trainer:50051"):
        with pytest.raises(UnusableAccess, match="in the clear: give --sidecar-ca"):
            dial(address, access)
