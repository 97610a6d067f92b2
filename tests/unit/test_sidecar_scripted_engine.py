"""The scripted engine does what an engine does, with the script's tokens."""

from __future__ import annotations

import asyncio
import logging
import math
import time

import pytest

from support.scripted import TOY_TOKENIZER, Json, call, script, tokens
from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import FinishReason, Sampling, Weights
from tokentape_sidecar.errors import CallError, InvalidArgument
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine


def engine_of(*calls: Json, repeat: bool = False, **model: object) -> ScriptedEngine:
    return ScriptedEngine(Script.model_validate(script(*calls, repeat=repeat, **model)), TOY_TOKENIZER)


async def play(engine: ScriptedEngine, prompt: list[int] | None = None, sampling: Sampling | None = None) -> CallRecord:
    """Make the next call and let it end."""
    request = CallRequest(prompt or [1, 2, 3], sampling=sampling or Sampling())
    record = await Calls(engine).start(request, None)
    async with asyncio.timeout(5):
        await record.wait_ended()
    return record


def outcome(record: CallRecord, choice: int = 0) -> tuple[list[int], FinishReason | None, int | str | None]:
    columns = record.choices[choice]
    completion = columns.completion
    return list(columns.token_ids), completion and completion.finish_reason, completion and completion.stop_reason


@pytest.mark.parametrize("order", [1, -1])
async def test_the_sampled_tokens_own_logprob_is_found_by_its_id_A01(order: int) -> None:
    first, second = {"13": -0.75, "42": -4.25}, {"7": -0.125, "9": -3.0}
    maps = [dict(list(values.items())[::order]) for values in (first, second)]
    record = await play(engine_of(call(tokens(42, 7, finish="stop", logprobs=maps))))
    assert list(record.choices[0].logprobs) == [-4.25, -0.125]


@pytest.mark.parametrize(
    "logprobs",
    [[{"13": -0.7}], [None], [], [{"42": "NaN"}], [{"42": "-Infinity"}], [{"42": math.nan}]],
)
async def test_a_token_without_a_usable_logprob_fails_the_call_A01(logprobs: list[object]) -> None:
    record = await play(engine_of(call(tokens(42, finish="stop", logprobs=logprobs))))
    assert isinstance(record.error, CallError)
    assert list(record.choices[0].token_ids) == []


async def test_without_logprobs_each_token_has_minus_one() -> None:
    record = await play(engine_of(call(tokens(42, 7, finish="stop"))))
    assert list(record.choices[0].logprobs) == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("sampled", "logprobs", "top"),
    [
        (10, {"10": -0.125, "11": -2.0}, [10, 11]),
        (99, {"99": -9.0, "10": -0.125, "11": -2.0}, [10, 11]),
        (10, {"11": -2.0, "12": -3.0, "10": -0.125}, [10, 11]),
    ],
)
async def test_top_logprobs_are_the_k_best_in_order_A04(
    sampled: int, logprobs: dict[str, float], top: list[int]
) -> None:
    record = await play(
        engine_of(call(tokens(sampled, finish="stop", logprobs=[logprobs]))), sampling=Sampling(top_logprobs=2)
    )
    assert list(record.choices[0].top_token_ids) == top
    assert list(record.choices[0].top_logprobs) == [-0.125, -2.0]
    assert list(record.choices[0].logprobs) == [logprobs[str(sampled)]]


async def test_fewer_entries_than_the_top_asked_for_fail_the_call_A04() -> None:
    record = await play(
        engine_of(call(tokens(10, finish="stop", logprobs=[{"10": -1.0}]))), sampling=Sampling(top_logprobs=2)
    )
    assert isinstance(record.error, CallError)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), ([65, 2], FinishReason.STOP, None)),
        (Sampling(stop_token_ids=(65,)), ([65], FinishReason.STOP, 65)),
        (Sampling(stop_token_ids=(65,), min_tokens=2), ([65, 2], FinishReason.STOP, None)),
        (Sampling(min_tokens=3), ([65, 2, 66], FinishReason.LENGTH, None)),
        (Sampling(ignore_eos=True), ([65, 2, 66], FinishReason.LENGTH, None)),
        (Sampling(ignore_eos=True, max_tokens=2), ([65, 2], FinishReason.LENGTH, None)),
        (Sampling(max_tokens=1), ([65], FinishReason.LENGTH, None)),
        (Sampling(stop=("A",)), ([65], FinishReason.STOP, "A")),
        (Sampling(ignore_eos=True, stop=("zz", "B")), ([65, 2, 66], FinishReason.STOP, "B")),
    ],
)
async def test_a_stop_token_is_the_last_sampled_one_and_nothing_is_made_up_A07(
    sampling: Sampling, expected: tuple[list[int], FinishReason, int | str | None]
) -> None:
    engine = engine_of(call(tokens(65, 2, 66, finish="length")), eos_token_ids=[2])
    assert outcome(await play(engine, sampling=sampling)) == expected


async def test_text_is_encoded_with_the_tokenizer() -> None:
    record = await play(engine_of(call({"text": "hé", "finish_reason": "stop"})))
    assert outcome(record)[0] == list("hé".encode())


async def test_choices_are_played_each_to_its_own_end_A13() -> None:
    engine = engine_of(
        call(tokens(10, choice=0), tokens(20, choice=1, finish="stop"), tokens(11, choice=0, finish="length"))
    )
    record = await play(engine, sampling=Sampling(n=2))
    assert outcome(record, 0) == ([10, 11], FinishReason.LENGTH, None)
    assert outcome(record, 1) == ([20], FinishReason.STOP, None)


async def test_a_script_with_more_choices_than_asked_for_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.n: "):
        await play(engine_of(call(tokens(10, choice=1, finish="stop"))))


async def test_calls_are_served_in_order_and_an_exhausted_script_is_an_error_of_that_call() -> None:
    engine = engine_of(call(tokens(10, finish="stop")), call(tokens(11, finish="stop")))
    assert [outcome(await play(engine))[0] for _ in range(2)] == [[10], [11]]
    with pytest.raises(CallError, match="the script is exhausted: it has 2 calls, and this is call 3"):
        await play(engine)


async def test_a_repeating_script_begins_again() -> None:
    engine = engine_of(call(tokens(10, finish="stop")), call(tokens(11, finish="stop")), repeat=True)
    assert [outcome(await play(engine))[0] for _ in range(5)] == [[10], [11], [10], [11], [10]]


async def test_an_unexpected_prompt_fails_the_call() -> None:
    engine = engine_of(call(tokens(10, finish="stop"), expect=[1, 2]), call(tokens(11, finish="stop"), expect=[1, 2]))
    assert outcome(await play(engine, [1, 2]))[0] == [10]
    with pytest.raises(CallError, match=r"expects the prompt \[1, 2\], but the call has \[1, 3\]"):
        await play(engine, [1, 3])


async def test_an_error_of_the_script_fails_the_call_after_its_tokens() -> None:
    record = await play(engine_of(call(tokens(10), {"error": "out of memory"})))
    assert str(record.error) == "out of memory"
    assert list(record.choices[0].token_ids) == [10]


async def test_a_script_that_ends_without_a_finish_fails_the_call() -> None:
    record = await play(engine_of(call(tokens(10))))
    assert str(record.error) == "the script ends without finishing choice 0"


async def test_versions_hold_until_the_next_one() -> None:
    engine = engine_of(call(tokens(10), tokens(11, weight_version="3"), tokens(12, finish="stop")))
    assert engine.weight_version == ""
    record = await play(engine)
    assert (record.choices[0].weights, record.choices[0].weight_starts) == ([Weights(), Weights("3")], [0, 1])
    assert engine.weight_version == "3"


async def test_tokens_come_at_the_scripts_pace_whether_or_not_anyone_reads() -> None:
    engine = engine_of(call(tokens(10), tokens(11, delay_ms=100, finish="stop")))
    record = await Calls(engine).start(CallRequest([1]), None)
    began = time.monotonic()
    async with asyncio.timeout(5):
        await record.wait_ended()
    assert time.monotonic() - began >= 0.099
    assert list(record.choices[0].token_ids) == [10, 11]


async def test_an_abort_keeps_what_was_sampled() -> None:
    engine = engine_of(call(tokens(10, 11), tokens(12, delay_ms=60_000, finish="stop")))
    calls = Calls(engine)
    record = await calls.start(CallRequest([1]), None)
    await record.wait_changed()
    await calls.abort(record.call_id)
    async with asyncio.timeout(5):
        await record.wait_ended()
    assert outcome(record) == ([10, 11], FinishReason.ABORT, None)


async def test_prompt_logprobs_are_the_scripts_found_by_id() -> None:
    engine = engine_of(
        {
            "prompt_logprobs": [{"9": -0.5, "2": -1.5}, {"8": -3.0, "3": -0.25}],
            "steps": [tokens(10, finish="stop")],
        }
    )
    record = await play(engine, sampling=Sampling(prompt_logprobs=1))
    assert list(record.prompt_logprobs or ()) == [-1.5, -0.25]
    top = record.prompt_top_logprobs
    assert top is not None
    assert (top.k, list(top.token_ids), list(top.logprobs)) == (1, [9, 3], [-0.5, -0.25])


async def test_unscripted_prompt_logprobs_are_minus_one_each() -> None:
    record = await play(engine_of(call(tokens(10, finish="stop"))), [1, 2, 3, 4], Sampling(prompt_logprobs=0))
    assert list(record.prompt_logprobs or ()) == [-1.0] * 3
    assert record.prompt_top_logprobs is None


async def test_calls_that_nobody_made_are_reported_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(call(tokens(10, finish="stop")), call(tokens(11, finish="stop")))
    await play(engine)
    with caplog.at_level(logging.WARNING):
        await engine.close()
    assert "1 of the script's 2 calls were never made" in caplog.text


async def test_an_abort_before_the_first_step_ends_the_call() -> None:
    engine = engine_of(call(tokens(10, finish="stop")))
    record = await Calls(engine).start(CallRequest([1]), None)
    await engine.abort(record.call_id)
    await record.wait_ended()
    assert record.error is None
    assert record.choices[0].completion is not None
    assert record.choices[0].completion.finish_reason is FinishReason.ABORT
