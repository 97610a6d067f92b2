"""TapeService over a socket: every watcher gets the whole tape, from anywhere, and only with its token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from support.refusals import refused
from support.scripted import Json, RunningSidecar, call, scripted_sidecar, tokens
from support.sidecar_client import OpenedTape, SidecarClient, new_tape_id, positions, prompts_on, sampled_on
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_sidecar.tape import SCHEMA_VERSION

Sampling = types_pb2.SamplingParameters
ABORT = types_pb2.FINISH_REASON_ABORT
INVALID = grpc.StatusCode.INVALID_ARGUMENT
FOREVER = 60_000

ANSWER = call(tokens(10, 11, finish="stop"))
ENDLESS = call(tokens(10, 11), tokens(12, delay_ms=FOREVER))


def slow_call(first: int, count: int, *, delay_ms: float = 1) -> Json:
    """A call that samples `count` ids from `first` on, one a step."""
    return call(*[tokens(first + i, delay_ms=delay_ms) for i in range(count)], tokens(finish="stop"))


async def record_rollout(client: SidecarClient) -> OpenedTape:
    """Three calls: one after the other, the last two at once, as children of the first."""
    tape = await client.open_tape()
    first = await client.generate([1, 2], Sampling(top_logprobs=1), tape_id=tape.tape_id, anchor="a")
    parent = types_pb2.CallReference(call_id=first.started.call_id)
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=[3], sampling=Sampling(n=2), tape_id=tape.tape_id, parent=parent, anchor="b"
    )
    second = client.generation.Generate(request)
    # Their order is the script's only once the second has arrived.
    assert (await anext(aiter(second))).HasField("started")
    await client.generate([4, 5], tape_id=tape.tape_id, parent=parent, anchor="a")
    async for _ in second:
        pass
    return tape


ROLLOUT = (
    call(tokens(10, weight_version="1"), tokens(11, 12, weight_version="2"), tokens(13, finish="stop")),
    call(
        *[tokens(100 + i, choice=i % 2, delay_ms=1) for i in range(20)],
        tokens(finish="stop"),
        tokens(choice=1, finish="stop"),
    ),
    slow_call(200, 15),
)


async def test_a_watcher_gets_the_rollout_as_it_was() -> None:
    async with scripted_sidecar(*ROLLOUT) as running:
        client = running.client
        tape = await record_rollout(client)
        sealed = await client.seal(tape)
        entries = await client.watch(tape)
    numbered = positions(entries)
    assert [number for number, _ in numbered] == list(range(sealed.end_sequence))
    started = [entry.call_started for entry in entries if entry.WhichOneof("entry") == "call_started"]
    assert [call.call_index for call in started] == [0, 1, 2]
    assert [call.anchor for call in started] == ["a", "b", "a"]
    ids = [call.call_id for call in started]
    assert prompts_on(entries) == {
        ids[0]: [1, 2],
        ids[1]: [1, 2, 10, 11, 12, 13, 3],
        ids[2]: [1, 2, 10, 11, 12, 13, 4, 5],
    }
    # A child's entry has only its own ids.
    assert list(started[1].prompt_token_ids) == [3]
    assert started[1].prompt_token_count == 7
    assert sampled_on(entries, ids[0]) == [10, 11, 12, 13]
    assert [sampled_on(entries, ids[1], choice) for choice in range(2)] == [
        list(range(100, 120, 2)),
        list(range(101, 120, 2)),
    ]
    assert sampled_on(entries, ids[2]) == list(range(200, 215))
    versions = [e.tokens_sampled.weight_version for e in entries if e.tokens_sampled.call_id == ids[0]]
    assert versions[:2] == ["1", "2"]
    seal = entries[-1].tape_sealed
    assert (seal.call_count, seal.sampled_token_count) == (3, 39) == (3, sealed.sampled_token_count)


async def test_a_watch_can_begin_at_every_sequence_number() -> None:
    async with scripted_sidecar(*ROLLOUT) as running:
        tape = await record_rollout(running.client)
        end = (await running.client.seal(tape)).end_sequence
        whole = positions(await running.client.watch(tape))
        assert len(whole) == end
        for start in range(end + 1):
            assert positions(await running.client.watch(tape, start)) == whole[start:]


async def test_live_watchers_that_come_at_different_times_get_equal_tapes() -> None:
    async with scripted_sidecar(*ROLLOUT) as running:
        client = running.client
        tape = await client.open_tape()
        early = asyncio.create_task(client.watch(tape))
        first = await client.generate([1, 2], tape_id=tape.tape_id)
        parent = types_pb2.CallReference(call_id=first.started.call_id)
        calls = [
            asyncio.create_task(client.generate([3], Sampling(n=2), tape_id=tape.tape_id, parent=parent)),
            asyncio.create_task(client.generate([4], tape_id=tape.tape_id, parent=parent)),
        ]
        await asyncio.sleep(0.01)
        late = asyncio.create_task(client.watch(tape))
        generated = await asyncio.gather(*calls)
        await client.seal(tape)
        whole = positions(await early)
        assert whole == positions(await late) == positions(await client.watch(tape))
        entries = await client.watch(tape)
    # The Generate streams and the tape are readers of one record.
    for one in generated:
        for choice in one.finished:
            assert sampled_on(entries, one.started.call_id, choice) == one.token_ids(choice)


async def test_a_watch_that_breaks_off_resumes_within_a_run_of_tokens() -> None:
    async with scripted_sidecar(slow_call(10, 50)) as running:
        client = running.client
        tape = await client.open_tape()
        generation = asyncio.create_task(client.generate(tape_id=tape.tape_id))
        seen: list[object] = []
        while len(seen) < 51:
            watch = client.tapes.WatchTape(
                tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=len(seen))
            )
            async for response in watch:
                seen += positions(response.entries)
                if response.entries:
                    break
            watch.cancel()
        await generation
        await client.seal(tape)
        assert seen == positions(await client.watch(tape))[: len(seen)]


async def test_caught_up_marks_tell_the_end_of_the_tape_as_it_stands() -> None:
    async with scripted_sidecar(ANSWER, ANSWER) as running:
        client = running.client
        tape = await client.open_tape()
        await client.generate(tape_id=tape.tape_id)
        watch = client.tapes.WatchTape(tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))
        first = await anext(aiter(watch))
        assert (positions(first.entries)[-1][0], first.caught_up_to) == (3, 4)
        watch.cancel()
        at_end = client.tapes.WatchTape(
            tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=4)
        )
        empty = await anext(aiter(at_end))
        assert (list(empty.entries), empty.caught_up_to) == ([], 4)
        at_end.cancel()


async def test_a_slow_watcher_delays_nobody_and_misses_nothing() -> None:
    count = 300_000
    long = call(*[tokens(*range(start, start + 1000)) for start in range(0, count, 1000)], tokens(finish="stop"))
    async with scripted_sidecar(long, max_model_len=count + 10, vocab_size=count) as running:
        client = running.client
        tape = await client.open_tape()
        slow = client.tapes.WatchTape(tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))
        responses = aiter(slow)
        await anext(responses)
        # It reads nothing while all is sampled, sealed, and read by another.
        generated = await client.generate(tape_id=tape.tape_id)
        await client.seal(tape)
        quick = await client.watch(tape)
        assert sampled_on(quick, generated.started.call_id) == list(range(count))
        late = [entry async for response in responses for entry in response.entries]
        assert positions(late) == positions(quick)


async def test_get_tape_pages_through_the_whole_tape() -> None:
    count = 150_000
    long = call(*[tokens(*range(start, start + 1000)) for start in range(0, count, 1000)], tokens(finish="stop"))
    async with scripted_sidecar(long, max_model_len=count + 10, vocab_size=count) as running:
        client = running.client
        tape = await client.open_tape()
        await client.generate(tape_id=tape.tape_id)
        pages: list[tape_pb2.GetTapeResponse] = []
        position = 0
        while not pages or position < pages[-1].end_sequence:
            pages.append(
                await client.tapes.GetTape(
                    tape_pb2.GetTapeRequest(
                        tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=position
                    )
                )
            )
            position = pages[-1].next_sequence
        assert len(pages) > 2
        assert all(page.ByteSize() < 4 * 1024 * 1024 for page in pages)
        assert {(page.schema_version, page.end_sequence, page.sealed) for page in pages} == {
            (SCHEMA_VERSION, count + 2, False)
        }
        await client.seal(tape)
        paged = positions([entry for page in pages for entry in page.entries])
        assert paged == positions(await client.watch(tape))[:-1]
        last = await client.tapes.GetTape(
            tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=position)
        )
        assert last.sealed
        assert last.entries[0].WhichOneof("entry") == "tape_sealed"


async def test_a_tape_of_many_long_prompts_can_be_read() -> None:
    """All of them in one message would be above the limit."""
    length, count = 1_500_000, 9
    async with scripted_sidecar(ANSWER, repeat=True, max_model_len=length + 10, vocab_size=300_000_000) as running:
        client = running.client
        tape = await client.open_tape()
        request = generation_pb2.GenerateRequest(prompt_token_ids=[299_999_999] * length, tape_id=tape.tape_id)
        assert request.ByteSize() * count > 64 * 1024 * 1024
        for _ in range(count):
            async for _ in client.generation.Generate(request):
                pass
        await client.seal(tape)
        watched = 0
        watch = client.tapes.WatchTape(tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))
        async for response in watch:
            watched += sum(len(entry.call_started.prompt_token_ids) for entry in response.entries)
        assert watched == length * count


async def test_calls_are_found_by_anchor_with_all_their_ids() -> None:
    async with scripted_sidecar(*ROLLOUT) as running:
        client = running.client
        tape = await record_rollout(client)
        found = await client.tapes.FindCalls(
            tape_pb2.FindCallsRequest(tape_id=tape.tape_id, anchors=["a", "x", ""], include_prompts=True)
        )
        first, second = found.calls
        assert [call.anchor for call in found.calls] == ["a", "a"]
        assert list(first.prompt_token_ids) == [1, 2]
        assert list(second.prompt_token_ids) == [1, 2, 10, 11, 12, 13, 4, 5]
        assert [list(choice.token_ids) for choice in first.choices] == [[10, 11, 12, 13]]
        assert first.choices[0].completion.finish_reason == types_pb2.FINISH_REASON_STOP
        exact = await client.tapes.FindCalls(
            tape_pb2.FindCallsRequest(tape_id=tape.tape_id, exact_token_ids=[1, 2, 10, 11, 12, 13])
        )
        assert [call.call_id for call in exact.calls] == [first.call_id]
        assert not exact.calls[0].prompt_token_ids
        nothing = await client.tapes.FindCalls(tape_pb2.FindCallsRequest(tape_id=tape.tape_id, anchors=["x"]))
        assert not nothing.calls


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
            with refused(grpc.StatusCode.FAILED_PRECONDITION, f"tape_id: the tape {tape.tape_id} is sealed"):
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
        with refused(grpc.StatusCode.NOT_FOUND, f"tape_id: there is no tape {tape.tape_id}"):
            await client.watch(tape)
        with refused(grpc.StatusCode.NOT_FOUND, tape.tape_id):
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
        with refused(grpc.StatusCode.ALREADY_EXISTS, tape.tape_id):
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
