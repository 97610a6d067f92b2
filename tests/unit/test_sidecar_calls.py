"""Calls: what the engine is given of them, what is clamped, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.calls import TAPE_ID, max_tokens, new_tape, prompt
from support.engines import ManualEngine, toy_model
from tokentape_sidecar.call_request import CallReference, CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import FinishReason, Sampling
from tokentape_sidecar.errors import (
    ContextOverflow,
    InvalidArgument,
    LimitReached,
    NotFound,
)
from tokentape_sidecar.tape import TapeLimits, TapePolicy

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


async def test_a_least_number_of_tokens_never_exceeds_the_room() -> None:
    engine = ManualEngine(toy_model(max_context_tokens=64))
    await Calls(engine).start(CallRequest(list(range(60)), sampling=Sampling(min_tokens=9)), None)
    assert (engine.submitted[-1].sampling.min_tokens, max_tokens(engine)) == (4, 4)


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


async def test_what_a_finished_choice_did_not_use_is_left_for_others() -> None:
    engine, tape = ManualEngine(), new_tape(limits=TapeLimits(max_sampled_tokens=20))
    record = await Calls(engine).start(prompt(3, max_tokens=8, n=2), tape)
    record.append(0, [1], [-0.5])
    assert tape.tokens_left() == 20 - 1 - 7 - 8
    record.finish(0, FinishReason.STOP)
    assert tape.tokens_left() == 20 - 1 - 8


async def test_a_tape_takes_no_more_calls_than_it_may() -> None:
    engine, tape = ManualEngine(), new_tape(limits=TapeLimits(max_calls=1))
    calls = Calls(engine)
    await calls.start(prompt(2), tape)
    with pytest.raises(LimitReached, match="max_calls"):
        await calls.start(prompt(2), tape)
