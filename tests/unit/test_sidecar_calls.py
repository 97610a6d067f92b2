"""Calls: what is refused, what is clamped, and how a call is ended early."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.engines import ManualEngine, toy_model
from tokentape_sidecar.calls import CallReference, CallRequest, Calls
from tokentape_sidecar.engine import FinishReason, Sampling
from tokentape_sidecar.errors import (
    CallError,
    ContextOverflow,
    EngineDead,
    InvalidArgument,
    LimitReached,
    NotFound,
    ShuttingDown,
    TapeSealed,
)
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.tape import CallFailed, Tape, TapeLimits, TapePolicy

TAPE_ID = "main." + "0" * 32


def new_tape(*, limits: TapeLimits | None = None, policy: TapePolicy | None = None, tape_id: str = TAPE_ID) -> Tape:
    return Tape(tape_id, limits or TapeLimits(), policy or TapePolicy())


def prompt(length: int, *, max_tokens: int | None = None, n: int | None = None) -> CallRequest:
    return CallRequest(list(range(length)), sampling=Sampling(max_tokens=max_tokens, n=n))


def finish_reason(record: CallRecord, choice: int = 0) -> FinishReason | None:
    completion = record.choices[choice].completion
    return completion and completion.finish_reason


def max_tokens(engine: ManualEngine) -> int | None:
    return engine.submitted[-1].sampling.max_tokens


# What the engine is given


@pytest.mark.parametrize(
    ("length", "asked", "granted"), [(60, 1, 1), (60, 4, 4), (60, 5, 4), (60, 10_000, 4), (60, None, 4), (63, None, 1)]
)
async def test_max_tokens_is_clamped_to_the_room_in_the_context_A11(
    length: int, asked: int | None, granted: int
) -> None:
    engine = ManualEngine(toy_model(max_context_tokens=64))
    record = await Calls(engine).start(CallRequest(list(range(length)), sampling=Sampling(max_tokens=asked)), None)
    assert max_tokens(engine) == granted == record.sampling.max_tokens


@pytest.mark.parametrize("length", [64, 65])
async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers_C06(length: int) -> None:
    engine = ManualEngine(toy_model(max_context_tokens=64))
    with pytest.raises(ContextOverflow, match=rf"maximum context length is 64 tokens, but the prompt has {length}"):
        await Calls(engine).start(prompt(length), None)
    assert engine.submitted == []


async def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="prompt_token_ids: must not be empty"):
        await Calls(ManualEngine()).start(prompt(0), None)


async def test_the_models_own_default_is_clamped_too() -> None:
    engine = ManualEngine(toy_model(default_sampling=Sampling(max_tokens=50, temperature=0.3)))
    calls = Calls(engine)
    await calls.start(prompt(60), None)
    await calls.start(prompt(2), None)
    assert [call.sampling.max_tokens for call in engine.submitted] == [4, 50]
    assert engine.submitted[0].sampling.temperature == 0.3


async def test_a_tapes_context_limit_binds_where_it_is_lower_than_the_models() -> None:
    engine = ManualEngine(toy_model(max_context_tokens=64))
    calls = Calls(engine)
    await calls.start(prompt(10), new_tape(limits=TapeLimits(max_context_tokens=16)))
    assert max_tokens(engine) == 6
    await calls.start(prompt(10), new_tape(limits=TapeLimits(max_context_tokens=1000)))
    assert max_tokens(engine) == 54
    with pytest.raises(ContextOverflow, match=r"length is 16 tokens, but the prompt has 16"):
        await calls.start(prompt(16), new_tape(limits=TapeLimits(max_context_tokens=16)))


async def test_the_whole_prompt_counts_when_a_parent_is_continued() -> None:
    engine, tape = ManualEngine(toy_model(max_context_tokens=20)), new_tape()
    calls = Calls(engine)
    parent = await calls.start(prompt(10), tape)
    engine.finish(parent.call_id, 500, 501, 502)
    child = await calls.start(CallRequest([7, 8], parent=CallReference(parent.call_id)), tape)
    assert list(engine.submitted[-1].prompt_token_ids) == [*range(10), 500, 501, 502, 7, 8]
    assert child.prompt_token_count == 15
    assert max_tokens(engine) == 5
    with pytest.raises(ContextOverflow, match="the prompt has 20"):
        await calls.start(CallRequest([7] * 7, parent=CallReference(parent.call_id)), tape)


@pytest.mark.parametrize("bad", [1000, 4_294_967_295])
async def test_ids_outside_of_the_vocabulary_never_reach_the_engine_A10(bad: int) -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    with pytest.raises(InvalidArgument, match=rf"prompt_token_ids\[1\]: token id {bad} is not in the vocabulary"):
        await calls.start(CallRequest([1, bad]), tape)
    assert engine.submitted == []
    assert tape.calls == []
    await calls.start(CallRequest([1, 999]), tape)
    assert list(engine.submitted[-1].prompt_token_ids) == [1, 999]


async def test_a_call_is_on_its_tape_before_the_engine_has_it() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    start = asyncio.create_task(Calls(engine).start(prompt(3), tape))
    await asyncio.sleep(0)
    assert engine.submitted
    assert [call.call_id for call in tape.calls] == [engine.submitted[0].call_id]
    engine.takes_calls.set()
    assert await start is tape.calls[0]


async def test_calls_of_a_tape_are_numbered_in_order() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    records = [await calls.start(prompt(3), tape) for _ in range(3)]
    assert [record.call_index for record in records] == [0, 1, 2]
    assert len({record.call_id for record in records}) == 3


# Parents


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (CallReference("call-x"), NotFound, r"parent.call_id: no call 'call-x' on this tape"),
        (CallReference("PARENT", choice=1), InvalidArgument, r"parent.choice: the call has 1 choices, not a choice 1"),
        (
            CallReference("PARENT", offset=4),
            InvalidArgument,
            r"parent.offset: the choice has 3 sampled tokens, not 4",
        ),
    ],
)
async def test_a_parent_that_is_not_there_is_refused_by_its_field(
    reference: CallReference, error: type[Exception], message: str
) -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    parent = await calls.start(prompt(2), tape)
    engine.finish(parent.call_id, 500, 501, 502)
    if reference.call_id == "PARENT":
        reference = replace(reference, call_id=parent.call_id)
    with pytest.raises(error, match=message):
        await calls.start(CallRequest([7], parent=reference), tape)
    assert len(engine.submitted) == 1


async def test_a_parent_needs_a_tape_and_must_be_on_the_same() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    parent = await calls.start(prompt(2), tape)
    with pytest.raises(InvalidArgument, match="parent: needs a tape_id"):
        await calls.start(CallRequest([7], parent=CallReference(parent.call_id)), None)
    with pytest.raises(NotFound, match=r"parent.call_id"):
        await calls.start(CallRequest([7], parent=CallReference(parent.call_id)), new_tape())


@pytest.mark.parametrize(("offset", "kept"), [(0, []), (2, [500, 501]), (None, [500, 501, 502])])
async def test_a_child_can_fork_at_any_token_of_its_parent(offset: int | None, kept: list[int]) -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    parent = await calls.start(prompt(2), tape)
    engine.finish(parent.call_id, 500, 501, 502)
    await calls.start(CallRequest([7], parent=CallReference(parent.call_id, 0, offset)), tape)
    assert list(engine.submitted[-1].prompt_token_ids) == [0, 1, *kept, 7]


# Policy and seeds


async def test_the_tapes_policy_overrides_what_it_has_and_leaves_the_rest() -> None:
    engine = ManualEngine(toy_model(default_sampling=Sampling(temperature=0.1, top_p=0.2, top_k=3)))
    policy = TapePolicy(Sampling(temperature=1.0, stop=("X",), max_tokens=9))
    request = CallRequest([1], sampling=Sampling(temperature=0.5, top_p=0.9, stop=("Y", "Z"), max_tokens=20))
    record = await Calls(engine).start(request, new_tape(policy=policy))
    in_force = Sampling(temperature=1.0, top_p=0.9, top_k=3, stop=("X",), max_tokens=9, n=1)
    assert engine.submitted[0].sampling == record.sampling == in_force


async def test_zero_in_a_policy_is_present_and_overrides() -> None:
    engine = ManualEngine()
    tape = new_tape(policy=TapePolicy(Sampling(temperature=0.0, ignore_eos=False)))
    await Calls(engine).start(CallRequest([1], sampling=Sampling(temperature=0.7, ignore_eos=True)), tape)
    assert engine.submitted[0].sampling.temperature == 0.0
    assert engine.submitted[0].sampling.ignore_eos is False


async def seeds(policy_seed: int | None, tape_id: str = TAPE_ID, *, own: int | None = None) -> list[int | None]:
    engine = ManualEngine()
    calls, tape = Calls(engine), new_tape(policy=TapePolicy(seed=policy_seed), tape_id=tape_id)
    for _ in range(3):
        await calls.start(CallRequest([1], sampling=Sampling(seed=own)), tape)
    return [call.sampling.seed for call in engine.submitted]


async def test_a_policy_seed_gives_each_call_its_own_seed_and_the_same_one_again() -> None:
    first = await seeds(7)
    assert first == await seeds(7, own=99)
    assert len(set(first)) == 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in first)
    others = await seeds(8) + await seeds(7, "main." + "1" * 32) + await seeds(0)
    assert len({*first, *others}) == 12


async def test_without_a_policy_seed_calls_keep_their_own() -> None:
    assert await seeds(None, own=99) == [99, 99, 99]
    assert await seeds(None) == [None, None, None]


# A tape's limits


async def test_concurrent_calls_together_cannot_pass_the_tapes_sampled_tokens() -> None:
    engine, tape = ManualEngine(), new_tape(limits=TapeLimits(max_sampled_tokens=10))
    calls = Calls(engine)
    await calls.start(prompt(2, max_tokens=6), tape)
    await calls.start(prompt(2), tape)
    assert [call.sampling.max_tokens for call in engine.submitted] == [6, 4]
    with pytest.raises(LimitReached, match=r"has 0 of its 10 sampled tokens left \(max_sampled_tokens\)"):
        await calls.start(prompt(2), tape)
    # What the first did not use is free again.
    engine.finish(engine.submitted[0].call_id, 5)
    await calls.start(prompt(2), tape)
    assert max_tokens(engine) == 5


async def test_choices_share_what_the_tape_has_left() -> None:
    engine, tape = ManualEngine(), new_tape(limits=TapeLimits(max_sampled_tokens=10))
    calls = Calls(engine)
    await calls.start(prompt(2, n=3), tape)
    assert max_tokens(engine) == 3
    with pytest.raises(LimitReached, match="has 1 of its 10"):
        await calls.start(prompt(2, n=2), tape)


async def test_a_tape_takes_no_more_calls_than_it_may() -> None:
    engine, tape = ManualEngine(), new_tape(limits=TapeLimits(max_calls=1))
    calls = Calls(engine)
    await calls.start(prompt(2), tape)
    with pytest.raises(LimitReached, match="max_calls"):
        await calls.start(prompt(2), tape)


# Ending early


async def test_abort_goes_to_the_engine_and_leaves_what_was_sampled() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.sinks[record.call_id].append(0, [5, 6], [-1.0, -1.0])
    await calls.abort(record.call_id)
    await calls.abort(record.call_id)
    assert engine.aborted == [record.call_id]
    assert list(record.choices[0].token_ids) == [5, 6]
    assert finish_reason(record) is FinishReason.ABORT
    assert calls.running_count == 0


async def test_aborting_an_unknown_or_finished_call_does_nothing_C03() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.finish(record.call_id, 5)
    await calls.abort(record.call_id)
    await calls.abort("call-unknown")
    assert engine.aborted == []


async def test_an_abort_that_comes_before_the_engine_took_the_call_still_ends_it() -> None:
    engine = ManualEngine()
    engine.takes_calls.clear()
    calls = Calls(engine)
    start = asyncio.create_task(calls.start(prompt(2), None))
    await asyncio.sleep(0)
    await calls.abort(engine.submitted[0].call_id)
    engine.takes_calls.set()
    record = await start
    assert finish_reason(record) is FinishReason.ABORT
    assert calls.running_count == 0


async def test_a_client_that_leaves_while_the_engine_takes_its_call_leaves_nothing_running() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    calls = Calls(engine)
    start = asyncio.create_task(calls.start(prompt(2), tape))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.sleep(0)
    assert engine.aborted == [engine.submitted[0].call_id]
    assert tape.calls[0].ended
    assert calls.running_count == 0


async def test_a_call_that_the_engine_refuses_is_a_failed_call_on_the_tape() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.refusal = InvalidArgument("sampling.structured_output.regex", "does not compile")
    calls = Calls(engine)
    with pytest.raises(InvalidArgument, match="does not compile"):
        await calls.start(prompt(2), tape)
    assert isinstance(tape.read(0, 10)[0][-1], CallFailed)
    assert calls.running_count == 0
    engine.refusal = None
    await calls.start(prompt(2), tape)


async def test_a_call_that_fails_by_what_the_engine_gave_is_ended_at_the_engine() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.sinks[record.call_id].append(0, [5], [])
    await asyncio.sleep(0)
    assert isinstance(record.error, CallError)
    assert engine.aborted == [record.call_id]


async def test_an_abandoned_call_is_aborted_and_a_finished_one_left_alone() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    left, done = await calls.start(prompt(2), None), await calls.start(prompt(2), None)
    engine.finish(done.call_id, 5)
    calls.abandon(left)
    calls.abandon(done)
    await left.wait_ended()
    assert engine.aborted == [left.call_id]


async def test_an_engine_that_dies_ends_all_calls_with_its_error() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    records = [await calls.start(prompt(2), None) for _ in range(2)]
    engine.sinks[records[0].call_id].append(0, [5], [-1.0])
    engine.die(EngineDead("the engine died"))
    assert [str(record.error) for record in records] == ["the engine died"] * 2
    assert list(records[0].choices[0].token_ids) == [5]
    assert calls.running_count == 0


# Sealing


async def test_sealing_aborts_what_runs_and_refuses_later_calls_for_good() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    running = await calls.start(prompt(2, n=2), tape)
    done = await calls.start(prompt(2), tape)
    engine.sinks[running.call_id].append(1, [5], [-1.0])
    engine.finish(done.call_id, 6)
    await calls.seal(tape)
    assert tape.sealed
    assert [finish_reason(running, choice) for choice in range(2)] == [FinishReason.ABORT] * 2
    assert finish_reason(done) is FinishReason.STOP
    assert tape.sampled_token_count == 2
    end = tape.end_sequence
    await calls.seal(tape)
    assert tape.end_sequence == end
    with pytest.raises(TapeSealed):
        await calls.start(prompt(2), tape)


async def test_a_call_cannot_slip_onto_a_tape_that_is_being_sealed() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    await calls.start(prompt(2), tape)
    engine.hands_over.clear()
    seal = asyncio.create_task(calls.seal(tape))
    await asyncio.sleep(0)
    with pytest.raises(TapeSealed):
        await calls.start(prompt(2), tape)
    assert not tape.sealed
    engine.hands_over.set()
    await seal
    assert tape.sealed


async def test_sealing_waits_for_a_call_that_the_engine_is_still_taking() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    calls = Calls(engine)
    start = asyncio.create_task(calls.start(prompt(2), tape))
    await asyncio.sleep(0)
    seal = asyncio.create_task(calls.seal(tape))
    await asyncio.sleep(0)
    assert not tape.sealed
    engine.takes_calls.set()
    assert finish_reason(await start) is FinishReason.ABORT
    await seal
    assert tape.sealed


async def test_a_tape_is_sealed_even_when_whoever_asked_for_it_has_gone() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    await calls.start(prompt(2), tape)
    engine.hands_over.clear()
    seal = asyncio.create_task(calls.seal(tape))
    await asyncio.sleep(0)
    seal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await seal
    engine.hands_over.set()
    async with asyncio.timeout(1):
        while not tape.sealed:
            await tape.wait_changed()


# Draining


async def test_draining_refuses_new_calls_and_lets_running_ones_finish() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    drain = asyncio.create_task(calls.drain(grace_seconds=30))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await calls.start(prompt(2), None)
    assert not drain.done()
    engine.finish(record.call_id, 5)
    await drain
    assert finish_reason(record) is FinishReason.STOP
    assert engine.aborted == []


async def test_draining_aborts_what_outlives_the_grace_period() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    records = [await calls.start(prompt(2), None) for _ in range(2)]
    await calls.drain(grace_seconds=0.01)
    assert [finish_reason(record) for record in records] == [FinishReason.ABORT] * 2


async def test_draining_ends_even_when_the_engine_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape_sidecar.calls.ABORT_SECONDS", 0.01)
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.hands_over.clear()
    async with asyncio.timeout(1):
        await calls.drain(grace_seconds=0)
    assert isinstance(record.error, ShuttingDown)
    await calls.close()


async def test_a_least_number_of_tokens_never_exceeds_the_room() -> None:
    engine = ManualEngine(toy_model(max_context_tokens=64))
    await Calls(engine).start(CallRequest(list(range(60)), sampling=Sampling(min_tokens=9)), None)
    assert (engine.submitted[-1].sampling.min_tokens, max_tokens(engine)) == (4, 4)


async def test_what_a_finished_choice_did_not_use_is_left_for_others() -> None:
    engine, tape = ManualEngine(), new_tape(limits=TapeLimits(max_sampled_tokens=20))
    record = await Calls(engine).start(prompt(3, max_tokens=8, n=2), tape)
    record.append(0, [1], [-0.5])
    assert tape.tokens_left() == 20 - 1 - 7 - 8
    record.finish(0, FinishReason.STOP)
    assert tape.tokens_left() == 20 - 1 - 8


async def test_a_client_that_leaves_while_the_engine_takes_its_call_has_abandoned_it() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    starting = asyncio.create_task(Calls(engine).start(prompt(3), tape))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    (record,) = tape.calls
    assert (record.error, finish_reason(record)) == (None, FinishReason.ABORT)
    await asyncio.sleep(0)
    assert engine.aborted == [record.call_id]
