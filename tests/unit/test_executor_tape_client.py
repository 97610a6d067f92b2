"""Following a tape over connections that break, on a real sidecar with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.scripted_agent import NoBridge
from tokentape.channel import dial
from tokentape.listen import ListenAddress
from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc, types_pb2
from tokentape_executor import tape_client
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import RolloutRefused, SidecarUnavailable, TapeLost
from tokentape_executor.executor import Outcome, RolloutClient, Row, TapeExecutor
from tokentape_executor.tape_client import OpenedTape, TapeClient, TapeOptions
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine
from tokentape_sidecar.server import Sidecar
from tokentape_sidecar.tape_store import SWEEP_SECONDS

PROMPT = [5, 6, 7]
COMPLETION = list(range(100, 140))


class Relay:
    """A TCP relay in front of a sidecar, which can drop its connections."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.refusing = False
        self.address = ""

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def sidecar(tmp_path: Path, model_directory: Path) -> AsyncGenerator[Sidecar]:
    steps = [{"token_ids": [token_id], "delay_ms": 10} for token_id in COMPLETION]
    script = tmp_path / "script.json"
    model = {"name": "toy", "max_model_len": 512, "vocab_size": 49152, "eos_token_ids": [2]}
    script.write_text(
        json.dumps({"model": model, "calls": [{"steps": [*steps[:-1], steps[-1] | {"finish_reason": "stop"}]}]})
    )
    engine = ScriptedEngine(Script.load(script), model_directory)
    sidecar = await Sidecar.start(engine, data=Listener(ListenAddress("127.0.0.1", 0)), name="main")
    yield sidecar
    await sidecar.stop(grace_seconds=0)
    await engine.close()


@pytest.fixture
async def relay(sidecar: Sidecar) -> AsyncGenerator[Relay]:
    relay = Relay(sidecar.address)
    server = await relay.serve()
    yield relay
    relay.drop()
    server.close()


@pytest.fixture
async def tapes(relay: Relay) -> AsyncGenerator[TapeClient]:
    async with dial(relay.address) as channel:
        yield TapeClient(channel, "main")


async def sample(address: str, tape: OpenedTape) -> None:
    """Make one call on the tape, directly at the sidecar, and read it to its end."""
    async with dial(address) as channel:
        request = generation_pb2.GenerateRequest(prompt_token_ids=PROMPT, tape_id=tape.tape_id)
        async for _ in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request):
            pass


async def follow(tapes: TapeClient, tape: OpenedTape, *, on_token: asyncio.Event) -> list[tape_pb2.TapeEntry]:
    entries: list[tape_pb2.TapeEntry] = []
    async for entry in tapes.watch(tape):
        entries.append(entry)
        if entry.HasField("tokens_sampled"):
            on_token.set()
    return entries


async def test_a_tape_is_complete_although_its_connection_breaks(
    sidecar: Sidecar, relay: Relay, tapes: TapeClient
) -> None:
    tape = await tapes.open()
    on_token = asyncio.Event()
    following = asyncio.create_task(follow(tapes, tape, on_token=on_token))
    sampling = asyncio.create_task(sample(sidecar.address, tape))
    for _ in range(3):
        on_token.clear()
        await on_token.wait()
        relay.drop()
    await sampling
    await tapes.seal(tape)

    assembler = Assembler()
    for entry in await following:
        assembler.feed(entry)
    (got,) = assembler.trajectory().samples
    assert got.tokens == [*PROMPT, *COMPLETION]
    assert got.action_ranges == [(len(PROMPT), len(PROMPT) + len(COMPLETION))]
    assert relay.connections >= 3


async def test_a_tape_can_be_watched_from_any_position(sidecar: Sidecar, tapes: TapeClient) -> None:
    tape = await tapes.open()
    await sample(sidecar.address, tape)
    await tapes.seal(tape)
    entries = [entry async for entry in tapes.watch(tape, from_sequence=11)]

    assert entries[0].sequence == 11
    token_ids = [token_id for entry in entries for token_id in entry.tokens_sampled.token_ids]
    assert token_ids == COMPLETION[10:]


async def test_a_sidecar_that_stays_away_is_given_up(
    monkeypatch: pytest.MonkeyPatch, relay: Relay, tapes: TapeClient
) -> None:
    monkeypatch.setattr(tape_client, "PATIENCE_SECONDS", 0.5)
    tape = await tapes.open()
    relay.refusing = True
    relay.drop()
    with pytest.raises(SidecarUnavailable, match="watching a tape failed with UNAVAILABLE"):
        await follow(tapes, tape, on_token=asyncio.Event())


async def test_a_tape_that_is_not_there_is_lost(tapes: TapeClient) -> None:
    unknown = OpenedTape(f"main.{'0' * 32}", "secret")
    with pytest.raises(TapeLost, match="watching a tape failed with NOT_FOUND"):
        await follow(tapes, unknown, on_token=asyncio.Event())
    with pytest.raises(TapeLost):
        await tapes.seal(unknown)


async def test_what_the_sidecar_refuses_is_told(tapes: TapeClient) -> None:
    with pytest.raises(RolloutRefused, match=r"opening a tape failed with INVALID_ARGUMENT: .*temperature"):
        await tapes.open(sampling_policy=types_pb2.SamplingParameters(temperature=-1))


async def test_every_tape_has_a_name_of_its_own(tapes: TapeClient) -> None:
    opened = [await tapes.open() for _ in range(3)]
    assert len({tape.tape_id for tape in opened}) == 3
    assert all(tape.tape_id.startswith("main.") for tape in opened)


async def test_a_tape_goes_when_it_was_kept_long_enough(sidecar: Sidecar, tapes: TapeClient) -> None:
    async with dial(sidecar.address) as channel:
        tape = await TapeClient(channel, "main", time_to_live_seconds=0.25).open()
    await tapes.seal(tape)
    await asyncio.sleep(SWEEP_SECONDS + 0.5)
    with pytest.raises(TapeLost):
        await tapes.seal(tape)


async def test_leaving_early_ends_the_watch_at_the_sidecar(sidecar: Sidecar, tapes: TapeClient) -> None:
    tape = await tapes.open()
    sampling = asyncio.create_task(sample(sidecar.address, tape))
    async with contextlib.aclosing(tapes.watch(tape)) as entries:
        async for entry in entries:
            if entry.HasField("tokens_sampled"):
                break
    await sampling
    await asyncio.wait_for(sidecar.stop(grace_seconds=0), 0.9)


async def test_sealing_waits_for_a_sidecar_that_comes_back(relay: Relay, tapes: TapeClient) -> None:
    tape = await tapes.open()
    relay.refusing = True
    relay.drop()
    sealing = asyncio.create_task(tapes.seal(tape))
    await asyncio.sleep(0.5)
    assert not sealing.done()
    relay.refusing = False
    await sealing
    assert await follow(tapes, tape, on_token=asyncio.Event())


async def test_sealing_at_a_sidecar_that_stays_away_is_given_up(
    monkeypatch: pytest.MonkeyPatch, relay: Relay, tapes: TapeClient
) -> None:
    monkeypatch.setattr(tape_client, "PATIENCE_SECONDS", 0.5)
    tape = await tapes.open()
    relay.refusing = True
    relay.drop()
    with pytest.raises(SidecarUnavailable, match="sealing a tape failed with UNAVAILABLE"):
        await tapes.seal(tape)


async def test_a_tape_shows_no_reader_token(tapes: TapeClient) -> None:
    tape = await tapes.open()
    assert tape.reader_token
    assert tape.reader_token not in repr(tape)


class OneCall(TapeExecutor):
    """An agent that makes a call, and another that must be refused."""

    def __init__(self, tapes: TapeClient, address: str) -> None:
        super().__init__(NoBridge(tapes))
        self._address = address

    async def run(self, task: Row, client: RolloutClient) -> Outcome:
        tape = OpenedTape(client.tape_id, "")
        await sample(self._address, tape)
        with pytest.raises(grpc.aio.AioRpcError, match=str(task["refusal"])):
            await sample(self._address, tape)
        return Outcome(1.0, truncated=False, report={})


@pytest.mark.parametrize(
    ("options", "sampled", "refusal"),
    [
        (TapeOptions(max_calls=1), len(COMPLETION), "max_calls"),
        (TapeOptions(max_sampled_tokens=5), 5, "max_sampled_tokens"),
    ],
)
async def test_a_rollout_bounds_its_tape(
    sidecar: Sidecar, tapes: TapeClient, options: TapeOptions, sampled: int, refusal: str
) -> None:
    rollout = await OneCall(tapes, sidecar.address).rollout({"refusal": refusal}, options=options)
    assert rollout.trajectory.receipt.sampled == sampled


@pytest.mark.parametrize(
    ("options", "opened_so"), [(TapeOptions(), False), (TapeOptions(policy_seed=0, keep_reasoning=True), True)]
)
async def test_a_tape_gives_seeds_and_keeps_reasoning_if_so_opened(
    sidecar: Sidecar, tapes: TapeClient, options: TapeOptions, *, opened_so: bool
) -> None:
    tape = await tapes.open(options=options)
    await sample(sidecar.address, tape)
    async with dial(sidecar.address) as channel:
        found = await tape_pb2_grpc.TapeServiceStub(channel).FindCalls(tape_pb2.FindCallsRequest(tape_id=tape.tape_id))
    assert found.keep_reasoning is opened_so

    await tapes.seal(tape)
    started = (await follow(tapes, tape, on_token=asyncio.Event()))[0].call_started
    assert started.sampling.HasField("seed") is opened_so
