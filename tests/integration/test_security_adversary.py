"""The agent's sandbox as the adversary: it holds a tape's id and the bridge's key, and may append to that tape.

Every RPC is tried with these, at the sidecar's own port; the bridge's routes are in `test_security_adversary_bridge`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from support.certificates import secret_file
from support.engines import ManualEngine
from support.guarded import guarded_sidecar
from support.refusals import refused
from support.sidecar_client import OpenedTape, SidecarClient
from support.waiting import eventually
from tokentape.access import Access
from tokentape.v1 import control_pb2, generation_pb2, tape_pb2, types_pb2

Status = grpc.StatusCode
Json = dict[str, Any]

pytestmark = pytest.mark.timeout(120)

BRIDGE_KEY, DATA, CONTROL = "the-bridges-key", "the-data-token", "the-control-token"
TAPE_SERVICE = tape_pb2.DESCRIPTOR.services_by_name["TapeService"]
CONTROL_SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
METHODS: list[MethodDescriptor] = [
    method
    for service in (generation_pb2.DESCRIPTOR.services_by_name["GenerationService"], TAPE_SERVICE, CONTROL_SERVICE)
    for method in service.methods
]
READER_METHODS = ("WatchTape", "GetTape", "SealTape", "DeleteTape")


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, fields: Json, metadata: Any = ()) -> list[Any]:
    """Call any method; return its responses."""
    request = GetMessageClass(method.input_type)
    make: Callable[..., Any] = channel.unary_stream if method.server_streaming else channel.unary_unary
    made = make(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=request.SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(request(**fields), timeout=10, metadata=metadata)
    return [response async for response in made] if method.server_streaming else [await made]


# At the port of a sidecar that asks for a token: nothing is open.


@pytest.mark.parametrize("held", ["tape id", "bridge key", "both"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_at_a_guarded_sidecar_nothing_is_open(tmp_path: Path, method: MethodDescriptor, held: str) -> None:
    data, control = secret_file(tmp_path / "data", DATA), secret_file(tmp_path / "control", CONTROL)
    async with (
        guarded_sidecar(ManualEngine(), token_file=data, control_token_file=control) as sidecar,
        SidecarClient(sidecar.address, access=Access(data)) as owner,
    ):
        tape = await owner.open_tape()
        token = {"tape id": tape.tape_id, "bridge key": BRIDGE_KEY, "both": f"{BRIDGE_KEY} {tape.tape_id}"}[held]
        address = sidecar.control_address if method.containing_service is CONTROL_SERVICE else sidecar.address
        known = {"tape_id": tape.tape_id} if "tape_id" in method.input_type.fields_by_name else {}
        async with grpc.aio.insecure_channel(cast("str", address)) as channel:
            with refused(Status.UNAUTHENTICATED, "no token, or a wrong one"):
                await call(channel, method, known, [("authorization", f"Bearer {token}")])
        assert len(await owner.entries(tape)) == 0


# At the port of one that does not, or with the bridge's token in hand: the tape's own secret still stands before it.


@dataclass(frozen=True, slots=True)
class Open:
    """A sidecar that asks for no token: who reaches it may sample, and knows `tape`'s id, but no reader token."""

    engine: ManualEngine
    client: SidecarClient
    tape: OpenedTape
    other: OpenedTape


@pytest.fixture
async def open_sidecar() -> AsyncGenerator[Open]:
    engine = ManualEngine()
    async with guarded_sidecar(engine) as sidecar, SidecarClient(sidecar.address) as client:
        policy = types_pb2.SamplingParameters(temperature=0.5, top_p=0.9, max_tokens=5, stop=["END"], n=1)
        yield Open(engine, client, await client.open_tape(sampling_policy=policy), await client.open_tape())


async def sample(running: Open, tape: OpenedTape, anchor: str, *token_ids: int) -> str:
    """Have the engine sample `token_ids` on `tape`; return the call's id."""
    before = len(running.engine.submitted)
    task = asyncio.create_task(running.client.generate([1, 2], tape_id=tape.tape_id, anchor=anchor))
    await eventually(lambda: len(running.engine.submitted) > before)
    running.engine.finish(running.engine.submitted[before].call_id, *token_ids)
    return (await task).started.call_id


@pytest.mark.parametrize("method", READER_METHODS)
@pytest.mark.parametrize("guess", ["nothing", "tape id", "a guess", "of another tape", "bridge key"])
async def test_a_tape_is_not_read_sealed_or_deleted_without_its_reader_token(
    open_sidecar: Open, method: str, guess: str
) -> None:
    tape = open_sidecar.tape
    shown = {
        "nothing": "",
        "tape id": tape.tape_id,
        "a guess": tape.reader_token[:-1] + "x",
        "of another tape": open_sidecar.other.reader_token,
        "bridge key": BRIDGE_KEY,
    }[guess]
    with refused(Status.PERMISSION_DENIED, "this is not the tape's reader token"):
        await call(
            open_sidecar.client.channel,
            TAPE_SERVICE.methods_by_name[method],
            {"tape_id": tape.tape_id, "reader_token": shown},
        )
    await sample(open_sidecar, tape, "", 7)
    assert len(await open_sidecar.client.entries(tape)) == 3


async def test_another_tape_is_not_found_without_its_id(open_sidecar: Open) -> None:
    guess = open_sidecar.other.tape_id[:-1] + ("0" if open_sidecar.other.tape_id[-1] != "0" else "1")
    for method in METHODS:
        if "tape_id" not in method.input_type.fields_by_name or method.name == "OpenTape":
            continue
        with refused(Status.NOT_FOUND, "^tape_id: there is no tape of this id$"):
            await call(open_sidecar.client.channel, method, {"tape_id": guess})


async def test_a_tape_cannot_be_opened_anew_for_its_reader_token(open_sidecar: Open) -> None:
    with refused(Status.ALREADY_EXISTS, "^tape_id: there is a tape of this id already$"):
        await open_sidecar.client.tapes.OpenTape(tape_pb2.OpenTapeRequest(tape_id=open_sidecar.tape.tape_id))


async def test_calls_of_another_tape_are_not_found_on_ones_own(open_sidecar: Open) -> None:
    theirs = await sample(open_sidecar, open_sidecar.other, "theirs", 7, 8)
    own = open_sidecar.tape.tape_id
    for request in (
        tape_pb2.FindCallsRequest(tape_id=own, anchors=["theirs", ""], include_prompts=True),
        tape_pb2.FindCallsRequest(tape_id=own, exact_token_ids=[1, 2, 7, 8], include_prompts=True),
    ):
        assert list((await open_sidecar.client.tapes.FindCalls(request)).calls) == []
    with refused(Status.NOT_FOUND, r"^parent\.call_id: no call"):
        await open_sidecar.client.generate([3], tape_id=own, parent=types_pb2.CallReference(call_id=theirs))


async def test_calls_of_ones_own_tape_are_found_only_by_who_knows_their_conversation(open_sidecar: Open) -> None:
    """By the fingerprint of all its messages, or by all its ids. This is what the bridge continues by."""
    await sample(open_sidecar, open_sidecar.tape, "the fingerprint", 7, 8)
    own = open_sidecar.tape.tape_id

    async def found(**known: Any) -> int:
        request = tape_pb2.FindCallsRequest(tape_id=own, include_prompts=True, **known)
        return len((await open_sidecar.client.tapes.FindCalls(request)).calls)

    assert await found() == 0
    assert await found(anchors=["", "the", "the fingerprint "]) == 0
    assert await found(exact_token_ids=[1, 2, 7]) == 0
    assert await found(exact_token_ids=[7, 8]) == 0
    assert await found(anchors=["the fingerprint"]) == 1


async def test_sampling_that_the_owner_has_set_cannot_be_changed(open_sidecar: Open) -> None:
    wanted = types_pb2.SamplingParameters(temperature=2.0, top_p=0.1, max_tokens=50, stop=["x"], n=3, min_tokens=2)
    task = asyncio.create_task(open_sidecar.client.generate([1], wanted, tape_id=open_sidecar.tape.tape_id))
    await eventually(lambda: bool(open_sidecar.engine.submitted))
    (submitted,) = open_sidecar.engine.submitted
    open_sidecar.engine.finish(submitted.call_id, 7)
    await task
    sampling = submitted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop, sampling.n) == (
        pytest.approx(0.5),
        pytest.approx(0.9),
        5,
        ("END",),
        1,
    )
    (started, *_) = await open_sidecar.client.entries(open_sidecar.tape)
    # What it may set is on the tape.
    assert started.call_started.sampling.min_tokens == 2


async def test_a_call_whose_id_is_guessed_is_not_aborted(open_sidecar: Open) -> None:
    task = asyncio.create_task(open_sidecar.client.generate([1], tape_id=open_sidecar.other.tape_id))
    await eventually(lambda: bool(open_sidecar.engine.submitted))
    call_id = open_sidecar.engine.submitted[0].call_id
    assert len(call_id.removeprefix("call-")) == 32
    for guess in ("", "call-", call_id[:-1], open_sidecar.other.tape_id):
        await open_sidecar.client.generation.Abort(generation_pb2.AbortRequest(call_id=guess))
    assert open_sidecar.engine.aborted == []
    open_sidecar.engine.finish(call_id, 7)
    assert (await task).token_ids() == [7]


async def test_the_controls_are_not_at_this_port(open_sidecar: Open) -> None:
    for method in CONTROL_SERVICE.methods:
        with refused(Status.UNIMPLEMENTED, ""):
            await call(open_sidecar.client.channel, method, {})


async def test_the_controls_list_tapes_without_their_ids(tmp_path: Path) -> None:
    control = secret_file(tmp_path / "control", CONTROL)
    async with (
        guarded_sidecar(ManualEngine(), control_token_file=control) as sidecar,
        SidecarClient(sidecar.address) as client,
        SidecarClient(cast("str", sidecar.control_address), access=Access(control)) as controls,
    ):
        tape = await client.open_tape()
        (listed,) = await call(controls.channel, CONTROL_SERVICE.methods_by_name["ListTapes"], {})
        assert len(listed.tapes) == 1
        assert tape.tape_id not in str(listed)
        assert tape.reader_token not in str(listed)
