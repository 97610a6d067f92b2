"""A sidecar with controls on a Unix socket, a controller of it, and calls in flight on its tapes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.scripted import TOY_TOKENIZER, Json, RunningSidecar, call, script, sidecar_on, tokens
from support.sidecar_client import Generated, OpenedTape, SidecarClient
from tokentape.channel import dial
from tokentape.listen import UnixAddress
from tokentape.v1 import control_pb2, control_pb2_grpc, tape_pb2
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine

KEEP, WAIT, ABORT = control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT, control_pb2.PAUSE_MODE_ABORT


class Controller:
    """A channel to a sidecar's controls, and what a trainer mostly asks."""

    def __init__(self, address: str) -> None:
        self.channel = dial(address)
        self.stub = control_pb2_grpc.ControlServiceStub(self.channel)

    async def pause(self, mode: control_pb2.PauseMode.ValueType = KEEP, *, keep_prefix_cache: bool = False) -> None:
        await self.stub.PauseGeneration(
            control_pb2.PauseGenerationRequest(mode=mode, keep_prefix_cache=keep_prefix_cache)
        )

    async def resume(self) -> None:
        await self.stub.ResumeGeneration(control_pb2.ResumeGenerationRequest())

    async def update(self, directory: str, version: str, *, deadline_seconds: float | None = None) -> None:
        request = control_pb2.UpdateWeightsRequest(directory=directory, weight_version=version)
        await self.stub.UpdateWeights(request, timeout=deadline_seconds)

    async def state(self) -> control_pb2.GetEngineStateResponse:
        return await self.stub.GetEngineState(control_pb2.GetEngineStateRequest())

    async def phase(self) -> str:
        """The state's name, without what all of them begin with."""
        return control_pb2.EngineState.Name((await self.state()).state).removeprefix("ENGINE_STATE_")

    async def until_phase(self, phase: str) -> None:
        """Return when the engine is there."""
        async with asyncio.timeout(20):
            while await self.phase() != phase:  # noqa: ASYNC110 - it is told to those who ask
                await asyncio.sleep(0.01)

    async def health(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        channel: Any = self.channel
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service="tokentape.v1.ControlService"))).status


@dataclass(frozen=True, slots=True)
class Call:
    """A call in flight, alone on its tape."""

    tape: OpenedTape
    generating: asyncio.Task[Generated]


@dataclass(frozen=True, slots=True)
class Controlled:
    """A sidecar, a client of it, a controller of it, and where its checkpoints are."""

    running: RunningSidecar
    client: SidecarClient
    controller: Controller
    address: str
    root: Path
    started: list[Call] = field(default_factory=list[Call])
    """All calls so far."""

    def checkpoint(self, name: str, **weights: object) -> None:
        """Write a checkpoint of a scripted engine."""
        (self.root / name).mkdir()
        (self.root / name / "weights.json").write_text(json.dumps(weights))

    async def start(self, count: int, limits: tape_pb2.TapeLimits | None = None) -> list[Call]:
        """Start calls, each on a tape of its own."""
        tapes = [await self.client.open_tape(limits=limits) for _ in range(count)]
        calls = [Call(tape, asyncio.create_task(self.client.generate(tape_id=tape.tape_id))) for tape in tapes]
        self.started.extend(calls)
        return calls

    async def start_sampling(self, count: int, limits: tape_pb2.TapeLimits | None = None) -> list[Call]:
        """Start calls, and return when each has sampled."""
        calls = await self.start(count, limits)
        await self.until_sampled(calls)
        return calls

    async def until_sampled(self, calls: Sequence[Call], least: int = 1) -> None:
        """Return when each call has this many tokens."""
        async with asyncio.timeout(20):
            while min(await self.sampled(calls)) < least:  # noqa: ASYNC110 - it is told to those who ask
                await asyncio.sleep(0.01)

    async def sampled(self, calls: Sequence[Call]) -> list[int]:
        """How many tokens each call has."""
        told = (await self.controller.stub.ListTapes(control_pb2.ListTapesRequest())).tapes
        counts = {tape.tape_id_sha256: tape.sampled_token_count for tape in told}
        return [counts[hashlib.sha256(call.tape.tape_id.encode()).hexdigest()] for call in calls]

    async def runs(self, call: Call) -> list[tape_pb2.TapeEntry.TokensSampled]:
        """What was sampled, as its tape has it."""
        entries = await self.client.entries(call.tape)
        return [entry.tokens_sampled for entry in entries if entry.HasField("tokens_sampled")]


STEPS = 40
"""Tokens of a call of `long_call`."""


def long_call(*, steps: int = STEPS, delay_ms: float = 20) -> Json:
    """A call of a script that samples one token at a time."""
    return call(*(tokens(10 + i, delay_ms=delay_ms) for i in range(steps - 1)), tokens(9, finish="stop"))


@asynccontextmanager
async def controlled(engine: Engine) -> AsyncGenerator[Controlled]:
    """Serve `engine` in this process, its controls on a Unix socket of its own."""
    with tempfile.TemporaryDirectory(prefix="tokentape-") as directory:
        root = Path(directory) / "checkpoints"
        root.mkdir()
        socket = UnixAddress(Path(directory) / "control.sock")
        async with sidecar_on(engine, control=Listener(socket), weights_root=root) as running:
            controller = Controller(str(socket))
            made = Controlled(running, running.client, controller, str(socket), root)
            yield made
            await controller.channel.close()
            for call in made.started:
                call.generating.cancel()
            await asyncio.gather(*(call.generating for call in made.started), return_exceptions=True)


@asynccontextmanager
async def controlled_script(*calls: Json) -> AsyncGenerator[Controlled]:
    """Serve a script, again and again."""
    content = Script.model_validate(script(*(calls or (long_call(),)), repeat=True))
    async with controlled(ScriptedEngine(content, TOY_TOKENIZER)) as made:
        yield made
