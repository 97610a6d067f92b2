"""GenerateMany over a socket: each call what it would be in Generate, and no call another's concern."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from support.certificates import secret_file
from support.engines import ManualEngine
from support.every_kind import SAMPLINGS, SCRIPT, by_generate, check_same
from support.guarded import guarded_sidecar
from support.many import OK, Stream, begin, code_of, leave
from support.refusals import refused
from support.scripted import call, scripted_sidecar, sidecar_on, tokens
from support.sidecar_client import SidecarClient, sampled_on
from support.waiting import eventually
from tokentape.access import Access
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_sidecar.engine import FinishReason
from tokentape_sidecar.errors import EngineDead

Sampling = types_pb2.SamplingParameters
Status = grpc.StatusCode

STOP, ABORT = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORT
ANSWER = call(tokens(10, 11, finish="stop"))


async def test_every_kind_of_call_is_what_generate_makes_of_it() -> None:
    expected = await by_generate()
    async with scripted_sidecar(*SCRIPT) as running:
        stream = Stream(running.client)
        for key, sampling in enumerate(SAMPLINGS):
            stream.send(begin(key, sampling=sampling))
            await eventually(lambda key=key: key in stream.calls.ended)
        many = await stream.rest()
    assert many.ended == dict.fromkeys(range(len(SAMPLINGS)), OK)
    for key, one in enumerate(expected):
        check_same(many.generated[key], one)


async def test_a_step_of_many_calls_is_one_message() -> None:
    engine, count = ManualEngine(), 200
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(*(begin(key) for key in range(count)))
        await eventually(lambda: len(stream.calls.generated) == count)
        before = stream.calls.message_count
        for step in range(3):
            for number, call_id in enumerate(list(engine.sinks)):
                engine.emit(call_id, 1000 * step + number)
            told = before + step + 1
            await eventually(lambda told=told: stream.calls.message_count == told)
        for call_id in list(engine.sinks):
            engine.finish(call_id)
        calls = await stream.rest()
    assert calls.message_count == before + 4
    assert calls.ended == dict.fromkeys(range(count), OK)
    submitted = [int(call.prompt_token_ids[0]) for call in engine.submitted]
    assert submitted == [1] * count
    assert sorted(calls.generated[key].token_ids()[0] for key in range(count)) == list(range(count))
    assert all(ids[1] - ids[0] == 1000 for ids in (calls.generated[key].token_ids() for key in range(count)))


async def test_what_a_slow_client_did_not_read_comes_together() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = running.client.generation.GenerateMany()
        for key in range(2):
            await stream.write(begin(key))
        await eventually(lambda: len(engine.sinks) == 2)
        for _ in range(20_000):
            for call_id in engine.sinks:
                engine.emit(call_id, 7)
        for call_id in list(engine.sinks):
            engine.finish(call_id)
        await stream.done_writing()
        messages = [message async for message in stream]
    assert sum(len(message.token_ids) for message in messages) == 40_000
    assert len(messages) < 10


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"prompt": [1, 5000]}, Status.INVALID_ARGUMENT, "prompt_token_ids[1]"),
        ({"prompt": []}, Status.INVALID_ARGUMENT, "prompt_token_ids"),
        ({"prompt": [1] * 2000}, Status.OUT_OF_RANGE, "maximum context length"),
        ({"tape_id": "main." + "0" * 32}, Status.NOT_FOUND, "tape_id"),
        ({"sampling": Sampling(max_tokens=0)}, Status.INVALID_ARGUMENT, "sampling.max_tokens"),
        ({"timeout": 0.0}, Status.INVALID_ARGUMENT, "timeout"),
        ({"timeout": -1.0}, Status.INVALID_ARGUMENT, "timeout"),
    ],
)
async def test_a_wrong_call_ends_alone_with_its_own_status(
    request_: dict[str, object], status: Status, words: str
) -> None:
    async with scripted_sidecar(ANSWER, max_model_len=1000, vocab_size=1000) as running:
        stream = Stream(running.client)
        stream.send(begin(7, **request_), begin(8))  # pyright: ignore[reportArgumentType] - of many types
        calls = await stream.rest()
    calls.check_refused(7, status, words)
    assert 7 not in calls.generated
    assert (calls.ended[8], calls.generated[8].token_ids()) == (OK, [10, 11])


async def test_a_call_that_the_engine_fails_ends_alone() -> None:
    nan = call(tokens(42, finish="stop", logprobs=[{"42": "NaN"}]))
    async with scripted_sidecar(nan, ANSWER) as running:
        stream = Stream(running.client)
        stream.send(begin(1), begin(2))
        calls = await stream.rest()
    calls.check_refused(1, Status.INTERNAL, "log-probability")
    assert (calls.ended[2], calls.generated[2].token_ids()) == (OK, [10, 11])


async def test_an_engine_that_dies_ends_all_calls_and_no_stream() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(begin(1), begin(2))
        await eventually(lambda: len(engine.sinks) == 2)
        engine.die(EngineDead("the engine died"))
        await eventually(lambda: len(stream.calls.ended) == 2)
        calls = await stream.rest()
    assert calls.ended == dict.fromkeys((1, 2), (code_of(Status.UNAVAILABLE), "the engine died"))


async def test_a_key_that_is_in_use_ends_the_stream_and_its_calls() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(begin(3), begin(3))
        with refused(Status.INVALID_ARGUMENT, "begin.key: the call 3 of this stream has not ended"):
            await stream.ended()
        await eventually(lambda: not running.sidecar.running_call_count)


async def test_one_message_may_leave_and_begin_many_calls() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        many = generation_pb2.GenerateManyRequest()
        for key in range(100):
            many.MergeFrom(begin(key, [1 + key]))
        stream.send(many)
        await eventually(lambda: len(stream.calls.generated) == 100)
        assert stream.calls.message_count < 10
        assert sorted(call.prompt_token_ids[0] for call in engine.submitted) == list(range(1, 101))
        stream.send(leave(*range(50), 7, 4711))
        await eventually(lambda: len(engine.sinks) == 50)
        for call_id in list(engine.sinks):
            engine.finish(call_id, 5)
        calls = await stream.rest()
    assert [calls.ended[key][0] for key in range(100)] == [code_of(Status.CANCELLED)] * 50 + [0] * 50


@pytest.mark.parametrize("sampled", [0, 2])
async def test_leaving_a_call_aborts_it_alone_and_frees_its_key_D03(sampled: int) -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        tape = await running.client.open_tape()
        stream = Stream(running.client)
        stream.send(begin(1, tape_id=tape.tape_id), begin(2))
        await eventually(lambda: len(engine.sinks) == 2)
        first, second = engine.sinks
        for token_id in range(sampled):
            engine.emit(first, token_id)
        stream.send(leave(1), leave(1, 99))
        await eventually(lambda: 1 in stream.calls.ended)
        assert stream.calls.ended[1] == (code_of(Status.CANCELLED), "the client has left this call")
        await eventually(lambda: running.sidecar.running_call_count == 1)
        entries = await running.client.entries(tape)
        assert entries[-1].choice_finished.completion.finish_reason == ABORT
        assert sampled_on(entries, first) == list(range(sampled))
        del stream.calls.ended[1], stream.calls.generated[1]
        stream.send(begin(1))
        await eventually(lambda: len(engine.submitted) == 3)
        engine.finish(engine.submitted[-1].call_id, 5)
        engine.finish(second, 6)
        calls = await stream.rest()
    assert engine.aborted == [first]
    assert calls.ended == {1: OK, 2: OK}
    assert [calls.generated[key].token_ids() for key in (1, 2)] == [[5], [6]]


async def test_a_call_that_is_left_while_the_engine_takes_it_is_aborted_D03() -> None:
    engine = ManualEngine()
    engine.takes_calls.clear()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(begin(1))
        await eventually(lambda: engine.submitted)
        stream.send(leave(1))
        await eventually(lambda: engine.aborted == [engine.submitted[0].call_id])
        calls = await stream.rest()
        assert not running.sidecar.running_call_count
    assert calls.ended == {1: (code_of(Status.CANCELLED), "the client has left this call")}


@pytest.mark.parametrize("takes_calls", [True, False])
async def test_a_call_out_of_time_is_aborted_and_says_so_D03(*, takes_calls: bool) -> None:
    engine = ManualEngine()
    if not takes_calls:
        engine.takes_calls.clear()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(begin(1, timeout=0.2), begin(2, timeout=60))
        await eventually(lambda: 1 in stream.calls.ended)
        assert stream.calls.ended == {1: (code_of(Status.DEADLINE_EXCEEDED), "the call took longer than its timeout")}
        await eventually(lambda: running.sidecar.running_call_count == 1)
        engine.takes_calls.set()
        await eventually(lambda: engine.submitted[1].call_id in engine.sinks)
        engine.finish(engine.submitted[1].call_id, 6)
        calls = await stream.rest()
    assert engine.aborted == [engine.submitted[0].call_id]
    assert calls.ended[2] == OK


async def test_a_client_that_leaves_aborts_all_its_calls_and_no_others_D03() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        streams = [Stream(running.client) for _ in range(2)]
        for stream in streams:
            stream.send(*(begin(key) for key in range(3)))
            await eventually(lambda stream=stream: len(stream.calls.generated) == 3)
        await streams[0].leave()
        await eventually(lambda: running.sidecar.running_call_count == 3)
        for call_id in list(engine.sinks):
            engine.finish(call_id, 6)
        calls = await streams[1].rest()
    assert len(engine.aborted) == 3
    assert calls.ended == dict.fromkeys(range(3), OK)


async def test_abort_ends_a_call_with_what_it_has() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(begin(1))
        await eventually(lambda: engine.sinks)
        engine.emit(engine.submitted[0].call_id, 10)
        await running.client.generation.Abort(generation_pb2.AbortRequest(call_id=engine.submitted[0].call_id))
        calls = await stream.rest()
    assert (calls.ended[1], calls.generated[1].token_ids()) == (OK, [10])
    assert calls.generated[1].finish_reason() == ABORT


async def test_a_token_that_is_taken_back_begins_no_more_calls_and_ends_none(tmp_path: Path) -> None:
    engine, tokens_file = ManualEngine(), secret_file(tmp_path / "data", "the-first-token")
    own = secret_file(tmp_path / "own", "the-first-token")
    async with (
        guarded_sidecar(engine, token_file=tokens_file) as sidecar,
        SidecarClient(sidecar.address, access=Access(token_file=own)) as client,
    ):
        stream = Stream(client)
        stream.send(begin(1))
        await eventually(lambda: engine.sinks)
        secret_file(tokens_file, "the-second-token")
        stream.send(begin(2))
        await eventually(lambda: 2 in stream.calls.ended)
        engine.finish(engine.submitted[0].call_id, 5)
        calls = await stream.rest()
    calls.check_refused(2, Status.UNAUTHENTICATED, "open another")
    assert (calls.ended[1], calls.generated[1].token_ids()) == (OK, [5])
    assert len(engine.submitted) == 1


async def test_a_stop_lets_running_calls_finish_and_refuses_new_ones_D11() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = Stream(running.client)
        stream.send(begin(1))
        await eventually(lambda: engine.sinks)
        stopping = asyncio.create_task(running.sidecar.stop(grace_seconds=20))
        await eventually(lambda: not running.sidecar.measured.calls.accepting)
        stream.send(begin(2))
        await eventually(lambda: 2 in stream.calls.ended)
        engine.finish(engine.submitted[0].call_id, 5, reason=FinishReason.STOP)
        await eventually(lambda: 1 in stream.calls.ended)
        await stopping
        await stream.leave()
    stream.calls.check_refused(2, Status.UNAVAILABLE, "shutting down")
    assert (stream.calls.ended[1], stream.calls.generated[1].token_ids()) == (OK, [5])
    assert stream.calls.generated[1].finish_reason() == STOP
