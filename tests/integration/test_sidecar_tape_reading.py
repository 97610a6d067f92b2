"""Reading a tape over a socket: every watcher, page and search gets what is on it, from anywhere."""

from __future__ import annotations

import asyncio

from support.scripted import Json, call, scripted_sidecar, tokens
from support.sidecar_client import OpenedTape, SidecarClient, positions, prompts_on, sampled_on
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_sidecar.tape import SCHEMA_VERSION

Sampling = types_pb2.SamplingParameters

ANSWER = call(tokens(10, 11, finish="stop"))


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
