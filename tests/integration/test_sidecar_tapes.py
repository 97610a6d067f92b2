"""TapeService over a socket: what ends a tape, what it refuses, and who may read it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from support.refusals import refused
from support.scripted import RunningSidecar, call, scripted_sidecar, tokens
from support.sidecar_client import OpenedTape, SidecarClient, new_tape_id, positions
from tokentape.v1 import tape_pb2, types_pb2

Sampling = types_pb2.SamplingParameters

ABORT = types_pb2.FINISH_REASON_ABORT

INVALID = grpc.StatusCode.INVALID_ARGUMENT

FOREVER = 60_000

ANSWER = call(tokens(10, 11, finish="stop"))

ENDLESS = call(tokens(10, 11), tokens(12, delay_ms=FOREVER))


async def test_a_running_call_is_found_as_far_as_it_has_come() -> None:
    async with scripted_sidecar(ENDLESS) as running:
        client = running.client
        tape = await client.open_tape()
        generation = asyncio.create_task(client.generate(tape_id=tape.tape_id, anchor="a"))
        await sampled_so_far(client, tape, 2)
        found = await client.tapes.FindCalls(tape_pb2.FindCallsRequest(tape_id=tape.tape_id, anchors=["a"]))
        (choice,) = found.calls[0].choices
        assert list(choice.token_ids) == [10, 11]
        assert not choice.HasField("completion")
        await client.seal(tape)
        await generation


async def sampled_so_far(client: SidecarClient, tape: OpenedTape, count: int) -> None:
    """Return when that many tokens are on the tape."""
    watch = client.tapes.WatchTape(tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))
    seen = 0
    async with asyncio.timeout(5):
        async for response in watch:
            seen += sum(len(entry.tokens_sampled.token_ids) for entry in response.entries)
            if seen >= count:
                break
    watch.cancel()


async def test_sealing_aborts_running_calls_and_refuses_later_ones_for_good() -> None:
    async with scripted_sidecar(ENDLESS, ENDLESS, ANSWER) as running:
        client = running.client
        tape = await client.open_tape()
        watcher = asyncio.create_task(client.watch(tape))
        calls = [asyncio.create_task(client.generate(tape_id=tape.tape_id)) for _ in range(2)]
        await sampled_so_far(client, tape, 4)
        sealed = await client.seal(tape)
        for generated in await asyncio.gather(*calls):
            assert (generated.token_ids(), generated.finish_reason()) == ([10, 11], ABORT)
        entries = await watcher
        assert entries[-1].WhichOneof("entry") == "tape_sealed"
        assert sealed.end_sequence == len(positions(entries)) == 9
        assert sealed.sampled_token_count == 4
        for _ in range(2):
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "tape_id: the tape is sealed"):
                await client.generate(tape_id=tape.tape_id)
        assert await client.seal(tape) == sealed
        assert (await client.generate()).token_ids() == [10, 11]


async def test_a_failed_call_says_why_on_the_tape() -> None:
    async with scripted_sidecar(call(tokens(10), {"error": "out of memory"})) as running:
        tape = await running.client.open_tape()
        with refused(grpc.StatusCode.INTERNAL, "out of memory"):
            await running.client.generate(tape_id=tape.tape_id)
        entries = await running.client.entries(tape)
    assert [entry.WhichOneof("entry") for entry in entries] == ["call_started", "tokens_sampled", "call_failed"]
    assert entries[-1].call_failed.message == "out of memory"


async def test_a_deleted_tape_ends_its_watchers_and_is_gone() -> None:
    async with scripted_sidecar(ENDLESS, ANSWER) as running:
        client = running.client
        tape, other = await client.open_tape(), await client.open_tape()
        watcher = asyncio.create_task(client.watch(tape))
        generation = asyncio.create_task(client.generate(tape_id=tape.tape_id))
        await sampled_so_far(client, tape, 2)
        await client.tapes.DeleteTape(tape_pb2.DeleteTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))
        assert (await generation).finish_reason() == ABORT
        assert (await watcher)[-1].WhichOneof("entry") == "tape_sealed"
        with refused(grpc.StatusCode.NOT_FOUND, "tape_id: there is no tape of this id"):
            await client.watch(tape)
        with refused(grpc.StatusCode.NOT_FOUND, "there is no tape of this id"):
            await client.generate(tape_id=tape.tape_id)
        assert (await client.generate(tape_id=other.tape_id)).token_ids() == [10, 11]


# Who may


Read = Callable[[SidecarClient, OpenedTape], Awaitable[object]]

READS: dict[str, Read] = {
    "WatchTape": lambda client, tape: client.watch(tape),
    "GetTape": lambda client, tape: client.entries(tape),
    "SealTape": lambda client, tape: client.seal(tape),
    "DeleteTape": lambda client, tape: client.tapes.DeleteTape(
        tape_pb2.DeleteTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
    ),
}


@pytest.mark.parametrize("read", READS)
async def test_without_its_reader_token_a_tape_is_closed(read: str) -> None:
    async with scripted_sidecar(ANSWER) as running:
        tape, other = await running.client.open_tape(), await running.client.open_tape()
        for token in ("", other.reader_token, tape.reader_token + "x", tape.tape_id):
            with refused(grpc.StatusCode.PERMISSION_DENIED, "reader_token: this is not the tape's reader token"):
                await READS[read](running.client, OpenedTape(tape.tape_id, token))
        with refused(grpc.StatusCode.NOT_FOUND, "tape_id: there is no tape"):
            await READS[read](running.client, OpenedTape(new_tape_id(), tape.reader_token))
        with refused(INVALID, "tape_id: names the sidecar 'other'; this one is 'main'"):
            await READS[read](running.client, OpenedTape(new_tape_id("other"), tape.reader_token))
        # It is still open, and still takes calls.
        assert (await running.client.generate(tape_id=tape.tape_id)).token_ids() == [10, 11]


@pytest.mark.parametrize("method", ["watch", "entries"])
async def test_a_position_beyond_the_end_is_out_of_range(method: str) -> None:
    async with scripted_sidecar(ANSWER) as running:
        tape = await running.client.open_tape()
        read = running.client.watch if method == "watch" else running.client.entries
        with refused(grpc.StatusCode.OUT_OF_RANGE, "from_sequence: 1 is beyond the tape's end, 0"):
            await read(tape, 1)


async def test_a_tape_id_is_taken_once() -> None:
    async with scripted_sidecar() as running:
        tape = await running.client.open_tape()
        with refused(grpc.StatusCode.ALREADY_EXISTS, "there is a tape of this id already"):
            await running.client.tapes.OpenTape(tape_pb2.OpenTapeRequest(tape_id=tape.tape_id))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (tape_pb2.OpenTapeRequest(), "tape_id"),
        (tape_pb2.OpenTapeRequest(tape_id="main.123"), "tape_id"),
        (tape_pb2.OpenTapeRequest(tape_id=new_tape_id("other")), "tape_id"),
        (
            tape_pb2.OpenTapeRequest(tape_id=new_tape_id(), limits=tape_pb2.TapeLimits(max_context_tokens=0)),
            "limits.max_context_tokens",
        ),
        (
            tape_pb2.OpenTapeRequest(tape_id=new_tape_id(), limits=tape_pb2.TapeLimits(max_sampled_tokens=0)),
            "limits.max_sampled_tokens",
        ),
        (
            tape_pb2.OpenTapeRequest(tape_id=new_tape_id(), limits=tape_pb2.TapeLimits(max_calls=0)),
            "limits.max_calls",
        ),
        (
            tape_pb2.OpenTapeRequest(
                tape_id=new_tape_id(), limits=tape_pb2.TapeLimits(time_to_live=Duration(seconds=-(2**62)))
            ),
            "limits.time_to_live",
        ),
        (
            tape_pb2.OpenTapeRequest(tape_id=new_tape_id(), sampling_policy=Sampling(top_p=2)),
            "sampling_policy.top_p",
        ),
    ],
)
async def test_a_malformed_tape_is_refused_by_its_field(request_: tape_pb2.OpenTapeRequest, field: str) -> None:
    async with scripted_sidecar() as running:
        with refused(INVALID, f"^{field}: "):
            await running.client.tapes.OpenTape(request_)
        await running.client.open_tape()


# What a tape does to its calls


async def test_policy_and_limits_of_the_tape_show_in_what_is_in_force() -> None:
    async with scripted_sidecar(call(tokens(*range(10, 40), finish="stop"))) as running:
        tape = await running.client.open_tape(
            limits=tape_pb2.TapeLimits(max_context_tokens=8),
            sampling_policy=Sampling(temperature=1.0),
            policy_seed=7,
        )
        generated = await running.client.generate(
            [1, 2, 3], Sampling(temperature=0.2, top_p=0.5, seed=1), tape_id=tape.tape_id
        )
        entries = await running.client.entries(tape)
    in_force = entries[0].call_started.sampling
    assert (in_force.temperature, in_force.top_p, in_force.max_tokens, in_force.n) == (1.0, 0.5, 5, 1)
    assert in_force.HasField("seed")
    assert in_force.seed != 1
    assert (generated.token_ids(), generated.started.max_tokens) == (list(range(10, 15)), 5)


async def test_limits_of_the_tape_refuse_by_their_name() -> None:
    async with scripted_sidecar(ANSWER, ANSWER) as running:
        client = running.client
        few_calls = await client.open_tape(limits=tape_pb2.TapeLimits(max_calls=1))
        few_tokens = await client.open_tape(limits=tape_pb2.TapeLimits(max_sampled_tokens=2))
        short = await client.open_tape(limits=tape_pb2.TapeLimits(max_context_tokens=3))
        for tape in (few_calls, few_tokens):
            assert (await client.generate(tape_id=tape.tape_id)).token_ids() == [10, 11]
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_calls"):
            await client.generate(tape_id=few_calls.tape_id)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_sampled_tokens"):
            await client.generate(tape_id=few_tokens.tape_id)
        with refused(grpc.StatusCode.OUT_OF_RANGE, "maximum context length is 3 tokens, but the prompt has 3"):
            await client.generate([1, 2, 3], tape_id=short.tape_id)


async def parent_of(running: RunningSidecar, tape: OpenedTape) -> str:
    return (await running.client.generate([1, 2], tape_id=tape.tape_id)).started.call_id


@pytest.mark.parametrize(
    ("choice", "offset", "status", "message"),
    [
        (1, None, INVALID, "parent.choice"),
        (0, 3, INVALID, r"parent.offset: the choice has 2 sampled tokens, not 3"),
    ],
)
async def test_a_parent_is_checked_and_the_next_call_served(
    choice: int, offset: int | None, status: grpc.StatusCode, message: str
) -> None:
    async with scripted_sidecar(ANSWER, call(tokens(20, finish="stop"), expect=[1, 2, 10, 3])) as running:
        client = running.client
        tape = await client.open_tape()
        call_id = await parent_of(running, tape)
        with refused(status, message):
            parent = types_pb2.CallReference(call_id=call_id, choice=choice, offset=offset)
            await client.generate([3], tape_id=tape.tape_id, parent=parent)
        with refused(grpc.StatusCode.NOT_FOUND, "parent.call_id"):
            await client.generate([3], tape_id=tape.tape_id, parent=types_pb2.CallReference(call_id="call-x"))
        with refused(INVALID, "parent: needs a tape_id"):
            await client.generate([3], parent=types_pb2.CallReference(call_id=call_id))
        # The script expects what a fork after the parent's first token must have as its prompt.
        fork = types_pb2.CallReference(call_id=call_id, offset=1)
        assert (await client.generate([3], tape_id=tape.tape_id, parent=fork)).token_ids() == [20]


async def test_a_child_may_add_no_ids_of_its_own() -> None:
    async with scripted_sidecar(ANSWER, call(tokens(20, finish="stop"), expect=[1, 2, 10])) as running:
        tape = await running.client.open_tape()
        parent = types_pb2.CallReference(call_id=await parent_of(running, tape), offset=1)
        generated = await running.client.generate([], tape_id=tape.tape_id, parent=parent)
    assert (generated.started.prompt_token_count, generated.token_ids()) == (3, [20])
