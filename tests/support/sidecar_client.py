"""A client of a sidecar for tests: the contract's stubs, and what a test mostly does with them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokentape.access import OPEN, Access
from tokentape.channel import dial
from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc, types_pb2

Position = tuple[object, ...]
"""What one position of a tape says: its kind, then its facts."""


@dataclass(slots=True)
class Generated:
    """A `Generate` stream, read to its end; the columns are by choice."""

    started: generation_pb2.GenerateResponse.Started = field(default_factory=generation_pb2.GenerateResponse.Started)
    deltas: list[generation_pb2.GenerateResponse.Delta] = field(
        default_factory=list[generation_pb2.GenerateResponse.Delta]
    )
    finished: dict[int, types_pb2.Completion] = field(default_factory=dict[int, types_pb2.Completion])

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        """Take the next response; the order that the contract promises is asserted."""
        match response.WhichOneof("event"):
            case "started":
                assert not self.started.call_id, "started came twice"
                self.started = response.started
            case "delta":
                assert self.started.call_id, "a delta came before started"
                assert response.delta.choice not in self.finished, "a delta came after its choice had finished"
                assert len(response.delta.token_ids) == len(response.delta.logprobs) > 0
                self.deltas.append(response.delta)
            case "finished":
                assert self.started.call_id, "a choice finished before started"
                assert response.finished.choice not in self.finished, "a choice finished twice"
                self.finished[response.finished.choice] = response.finished
            case None:
                raise AssertionError("an empty response")

    def token_ids(self, choice: int = 0) -> list[int]:
        """The ids that the choice sampled."""
        return [token_id for delta in self.deltas if delta.choice == choice for token_id in delta.token_ids]

    def logprobs(self, choice: int = 0) -> list[float]:
        """Their log-probabilities."""
        return [value for delta in self.deltas if delta.choice == choice for value in delta.logprobs]

    def weight_versions(self, choice: int = 0) -> list[str]:
        """Their weight versions, one per token."""
        return [delta.weight_version for delta in self.deltas if delta.choice == choice for _ in delta.token_ids]

    def finish_reason(self, choice: int = 0) -> types_pb2.FinishReason.ValueType:
        """Why the choice ended."""
        return self.finished[choice].finish_reason


async def read_to_end(stream: AsyncIterable[generation_pb2.GenerateResponse]) -> Generated:
    """Read a `Generate` stream."""
    generated = Generated()
    async for response in stream:
        generated.take(response)
    return generated


@dataclass(frozen=True, slots=True)
class OpenedTape:
    """A tape and the secret that reading it takes."""

    tape_id: str
    reader_token: str


class SidecarClient:
    """A channel to a sidecar and its stubs."""

    def __init__(self, address: str, name: str = "main", access: Access = OPEN) -> None:
        self.name = name
        self.channel = dial(address, access)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.tapes = tape_pb2_grpc.TapeServiceStub(self.channel)
        channel: Any = self.channel
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        """Of a package that knows only synchronous channels in its types."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.channel.close()

    async def generate(
        self,
        prompt_token_ids: Iterable[int] = (1, 2, 3),
        sampling: types_pb2.SamplingParameters | None = None,
        *,
        tape_id: str = "",
        parent: types_pb2.CallReference | None = None,
        anchor: str = "",
    ) -> Generated:
        """Make a call and read it to its end."""
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=prompt_token_ids, sampling=sampling, tape_id=tape_id, parent=parent, anchor=anchor
        )
        return await read_to_end(self.generation.Generate(request))

    async def open_tape(
        self,
        *,
        limits: tape_pb2.TapeLimits | None = None,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        policy_seed: int | None = None,
        keep_reasoning: bool = False,
    ) -> OpenedTape:
        """Open a tape under a new id."""
        tape_id = new_tape_id(self.name)
        response = await self.tapes.OpenTape(
            tape_pb2.OpenTapeRequest(
                tape_id=tape_id,
                limits=limits,
                sampling_policy=sampling_policy,
                policy_seed=policy_seed,
                keep_reasoning=keep_reasoning,
            )
        )
        return OpenedTape(tape_id, response.reader_token)

    async def watch(self, tape: OpenedTape, from_sequence: int = 0) -> list[tape_pb2.TapeEntry]:
        """Watch a tape until it is sealed."""
        request = tape_pb2.WatchTapeRequest(
            tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=from_sequence
        )
        return [entry async for response in self.tapes.WatchTape(request) for entry in response.entries]

    async def entries_until_lost(self, tape: OpenedTape) -> list[tape_pb2.TapeEntry]:
        """Watch a tape until the sidecar ends it unsealed, as it must where it ends itself."""
        request = tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
        entries: list[tape_pb2.TapeEntry] = []
        try:
            async for response in self.tapes.WatchTape(request):
                entries += response.entries
        except grpc.aio.AioRpcError:
            return entries
        raise AssertionError("the watcher was told that the tape is complete")

    async def entries(self, tape: OpenedTape, from_sequence: int = 0) -> list[tape_pb2.TapeEntry]:
        """What a tape holds as it stands, by `GetTape`, page after page."""
        entries: list[tape_pb2.TapeEntry] = []
        while True:
            page = await self.tapes.GetTape(
                tape_pb2.GetTapeRequest(
                    tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=from_sequence
                )
            )
            entries += page.entries
            from_sequence = page.next_sequence
            if from_sequence == page.end_sequence:
                return entries

    async def seal(self, tape: OpenedTape) -> tape_pb2.SealTapeResponse:
        """Seal a tape."""
        return await self.tapes.SealTape(tape_pb2.SealTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))

    async def health_of(self, service: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
        """The standard health service's answer."""
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status


def new_tape_id(sidecar_name: str = "main") -> str:
    """A tape id as a client chooses it."""
    return f"{sidecar_name}.{secrets.token_hex(16)}"


def positions(entries: Iterable[tape_pb2.TapeEntry]) -> list[tuple[int, Position]]:
    """Every position of these entries with its sequence number, runs of tokens taken apart.

    Two reads of the same stretch of a tape give equal lists, however each was grouped.
    """
    return [position for entry in entries for position in _positions_of(entry)]


def _positions_of(entry: tape_pb2.TapeEntry) -> Iterable[tuple[int, Position]]:
    match entry.WhichOneof("entry"):
        case "tokens_sampled":
            yield from _token_positions(entry.sequence, entry.tokens_sampled)
        case "call_started":
            started = entry.call_started
            parent = started.parent if started.HasField("parent") else None
            yield (
                entry.sequence,
                (
                    "started",
                    started.call_id,
                    started.call_index,
                    (parent.call_id, parent.choice, parent.offset) if parent else None,
                    tuple(started.prompt_token_ids),
                    started.prompt_token_count,
                    started.anchor,
                    started.split_cause,
                ),
            )
        case "choice_finished":
            finished = entry.choice_finished
            completion = finished.completion
            yield (
                entry.sequence,
                ("finished", finished.call_id, completion.choice, completion.finish_reason, completion.token_count),
            )
        case "call_failed":
            yield entry.sequence, ("failed", entry.call_failed.call_id, entry.call_failed.message)
        case "tape_sealed":
            sealed = entry.tape_sealed
            yield entry.sequence, ("sealed", sealed.call_count, sealed.sampled_token_count)
        case None:
            raise AssertionError("an empty entry")


def _token_positions(sequence: int, run: tape_pb2.TapeEntry.TokensSampled) -> Iterable[tuple[int, Position]]:
    assert len(run.token_ids) == len(run.logprobs) > 0
    top = run.top_logprobs
    assert len(top.token_ids) == len(top.logprobs) == top.k * len(run.token_ids)
    for index, (token_id, logprob) in enumerate(zip(run.token_ids, run.logprobs, strict=True)):
        best = slice(index * top.k, (index + 1) * top.k)
        yield (
            sequence + index,
            (
                "token",
                run.call_id,
                run.choice,
                token_id,
                logprob,
                run.weight_version,
                tuple(zip(top.token_ids[best], top.logprobs[best], strict=True)),
            ),
        )


def sampled_on(entries: Iterable[tape_pb2.TapeEntry], call_id: str, choice: int = 0) -> list[int]:
    """The ids that a call's choice sampled, by the tape."""
    return [
        token_id
        for entry in entries
        if entry.tokens_sampled.call_id == call_id and entry.tokens_sampled.choice == choice
        for token_id in entry.tokens_sampled.token_ids
    ]


def prompts_on(entries: Sequence[tape_pb2.TapeEntry]) -> dict[str, list[int]]:
    """The whole prompt of every call, put together from the tape alone."""
    prompts: dict[str, list[int]] = {}
    for entry in entries:
        if entry.WhichOneof("entry") == "call_started":
            started = entry.call_started
            prefix: list[int] = []
            if started.HasField("parent"):
                parent = started.parent
                sampled = sampled_on(entries, parent.call_id, parent.choice)[: parent.offset]
                prefix = prompts[parent.call_id] + sampled
            prompts[started.call_id] = prefix + list(started.prompt_token_ids)
    return prompts
