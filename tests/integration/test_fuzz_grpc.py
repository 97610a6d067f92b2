"""Anything at all as a request of any method: an answer that says what is wrong, no crash, and the next call is served.

`TOKENTAPE_EFFORT=100 pytest --timeout 0 tests/integration/test_fuzz_grpc.py` tries for hours.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given
from hypothesis import strategies as st

from support.effort import fuzzing
from support.fuzzed_messages import CALL, TAPE, TOKEN, edited, edits, filled, messages
from support.scripted import SidecarProcess, call, script, scripted_arguments, sidecar_process, tokens
from support.sidecar_client import new_tape_id
from tokentape.v1 import (
    control_pb2,
    control_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    tape_pb2,
    tape_pb2_grpc,
)

ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""What a client can be told of its request; all others say that the sidecar is at fault."""
MOST_RESPONSES = 20
SECONDS = 20
BOUNDED = fuzzing(25)


def methods_of(*names: str) -> list[MethodDescriptor]:
    services = {
        **generation_pb2.DESCRIPTOR.services_by_name,
        **tape_pb2.DESCRIPTOR.services_by_name,
        **control_pb2.DESCRIPTOR.services_by_name,
    }
    return [method for name in names for method in services[name].methods]


@dataclass(slots=True)
class Target:
    """A sidecar process whose script answers every call, and channels to it."""

    process: SidecarProcess
    data: grpc.Channel
    control: grpc.Channel
    tapes: Any = field(init=False)
    generation: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tapes = tape_pb2_grpc.TapeServiceStub(self.data)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.data)

    def names(self) -> dict[str, str]:
        """A new tape with a call on it, as requests name them."""
        tape_id = new_tape_id()
        opened = self.tapes.OpenTape(tape_pb2.OpenTapeRequest(tape_id=tape_id), timeout=SECONDS)
        return {TAPE: tape_id, TOKEN: opened.reader_token, CALL: self.generate(tape_id)}

    def generate(self, tape_id: str = "") -> str:
        """Make a call and see that it is answered as scripted; return its id."""
        request = generation_pb2.GenerateRequest(prompt_token_ids=[1, 2], tape_id=tape_id)
        started, *others = self.generation.Generate(request, timeout=SECONDS)
        assert [token_id for each in others for token_id in each.delta.token_ids] == [5, 6]
        return started.started.call_id

    def send(self, method: MethodDescriptor, request: bytes) -> grpc.StatusCode:
        """Send bytes to a method; of a stream's responses, some are read."""
        service = method.containing_service
        channel: Any = self.control if service.name == "ControlService" else self.data
        path = f"/{service.full_name}/{method.name}"
        try:
            if not method.server_streaming:
                channel.unary_unary(path)(request, timeout=SECONDS)
                return grpc.StatusCode.OK
            stream: Iterator[object] = channel.unary_stream(path)(request, timeout=SECONDS)
            most = 1 if method.name == "WatchTape" else MOST_RESPONSES
            list(islice(stream, most))
            cast("grpc.Call", stream).cancel()
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined] # the stubs do not know that it is a call too
        return grpc.StatusCode.OK

    def revive(self) -> None:
        """Let the engine sample again, whatever the controls did to it."""
        control: Any = control_pb2_grpc.ControlServiceStub(self.control)
        control.WakeUp(control_pb2.WakeUpRequest(), timeout=SECONDS)
        # A deep sleep has discarded the weights.
        control.UpdateWeights(control_pb2.UpdateWeightsRequest(directory="good", weight_version="1"), timeout=SECONDS)
        control.ResumeGeneration(control_pb2.ResumeGenerationRequest(), timeout=SECONDS)

    def check(self) -> None:
        """It lives, serves, and nothing has surprised it."""
        self.revive()
        self.generate()
        assert self.process.process.poll() is None
        assert "Traceback" not in self.process.output
        assert "unexpectedly" not in self.process.output


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "weights" / "good").mkdir(parents=True)
    (directory / "weights" / "good" / "weights.json").write_text("{}")
    content = script(call(tokens(5), tokens(6, finish="stop")), repeat=True, max_logprobs=0)
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as short, asyncio.Runner() as runner:
        control_address = f"unix:{short}/control/control.sock"
        starting = sidecar_process(
            *scripted_arguments(content, directory), "--max-choices", "1", "--control", control_address,
            "--weights-root", str(directory / "weights"), directory=directory,
        )  # fmt: skip
        process = runner.run(starting.__aenter__())
        with grpc.insecure_channel(process.address) as data, grpc.insecure_channel(control_address) as control:
            yield Target(process, data, control)
        runner.run(starting.__aexit__(None, None, None))


EVERY_METHOD = pytest.mark.parametrize(
    "method", methods_of("GenerationService", "TapeService", "ControlService"), ids=lambda method: method.name
)


@EVERY_METHOD
def test_bytes(method: MethodDescriptor, target: Target) -> None:
    @given(request=st.binary(max_size=200))
    @BOUNDED
    def answered(request: bytes) -> None:
        assert target.send(method, request) in ANSWERS

    answered()
    target.check()


@EVERY_METHOD
def test_requests_that_nobody_would_send(method: MethodDescriptor, target: Target) -> None:
    @given(request=messages(method.input_type), changes=st.just([]) | edits())
    @BOUNDED
    def answered(request: Any, changes: list[tuple[int, int, bytes]]) -> None:
        content = filled(request, target.names()).SerializeToString()
        status = target.send(method, edited(content, changes))
        if method.containing_service.name == "ControlService":
            target.revive()
        assert status in ANSWERS

    answered()
    target.check()


def test_metadata_that_nobody_would_send(target: Target) -> None:
    key = st.from_regex(r"[a-z0-9._-]{1,30}", fullmatch=True).filter(lambda it: not it.startswith("grpc-"))
    value = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=50)

    @given(metadata=st.lists(st.tuples(key, value), max_size=8))
    @BOUNDED
    def answered(metadata: list[tuple[str, str]]) -> None:
        binary = [(name, text.encode() if name.endswith("-bin") else text) for name, text in metadata]
        assert target.generation.GetModel(generation_pb2.GetModelRequest(), timeout=SECONDS, metadata=binary).name

    answered()
    target.check()


def test_bytes_that_are_not_http2(target: Target) -> None:
    host, _, port = target.process.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    @given(content=st.binary(max_size=300), speaks=st.booleans())
    @BOUNDED
    def survived(content: bytes, *, speaks: bool) -> None:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(preface * speaks + content)

    survived()
    target.check()


def test_names_are_filled_in() -> None:
    """Or no request would get past the first check."""
    request = tape_pb2.WatchTapeRequest(tape_id=TAPE, reader_token=TOKEN)
    assert filled(request, {TAPE: "a", TOKEN: "b"}) == tape_pb2.WatchTapeRequest(tape_id="a", reader_token="b")
    nested = generation_pb2.GenerateRequest(tape_id=TAPE)
    nested.parent.call_id = CALL
    assert filled(nested, {TAPE: "a", CALL: "c"}).parent.call_id == "c"  # type: ignore[attr-defined]
