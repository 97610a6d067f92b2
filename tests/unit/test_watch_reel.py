"""A tape as it unrolls: what its entries mean for whoever looks on."""

from __future__ import annotations

from typing import Any

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.watch.reel import (
    CallBegun,
    CallBroken,
    ChoiceEnded,
    ChoiceGrown,
    Reel,
    ReelEnded,
    Weights,
)


def started(call_id: str, sequence: int = 0, *, parent: str = "", n: int = 1) -> tape_pb2.TapeEntry:
    return tape_pb2.TapeEntry(
        sequence=sequence,
        call_started=tape_pb2.TapeEntry.CallStarted(
            call_id=call_id,
            parent=types_pb2.CallReference(call_id=parent) if parent else None,
            prompt_token_ids=[1, 2],
            prompt_token_count=2,
            sampling=types_pb2.SamplingParameters(n=n),
        ),
    )


def sampled(call_id: str, sequence: int, *ids: int, choice: int = 0, **fields: Any) -> tape_pb2.TapeEntry:
    run = tape_pb2.TapeEntry.TokensSampled(
        call_id=call_id, choice=choice, token_ids=ids, logprobs=[-0.5] * len(ids), **fields
    )
    return tape_pb2.TapeEntry(sequence=sequence, tokens_sampled=run)


def finished(call_id: str, sequence: int, choice: int = 0) -> tape_pb2.TapeEntry:
    completion = types_pb2.Completion(choice=choice, finish_reason=types_pb2.FINISH_REASON_STOP)
    return tape_pb2.TapeEntry(
        sequence=sequence,
        choice_finished=tape_pb2.TapeEntry.ChoiceFinished(call_id=call_id, completion=completion),
    )


def test_a_call_from_its_start_to_its_end() -> None:
    reel = Reel()
    begun = reel.take(started("a"))
    assert isinstance(begun, CallBegun)
    grown = reel.take(sampled("a", 1, 10, 11))
    assert isinstance(grown, ChoiceGrown)
    assert (grown.count, grown.choice.token_ids, grown.choice.pieces) == (2, [10, 11], ["", ""])
    assert list(reel.running) == [begun.call]
    assert reel.next_sequence == 3
    assert isinstance(reel.take(finished("a", 3)), ChoiceEnded)
    assert list(reel.running) == []
    seal = tape_pb2.TapeEntry.TapeSealed(call_count=1, sampled_token_count=2)
    assert reel.take(tape_pb2.TapeEntry(sequence=4, tape_sealed=seal)) == ReelEnded(1, 2)
    assert (reel.sampled, reel.next_sequence, reel.sealed) == (2, 5, True)


def test_a_call_runs_until_its_last_choice_has_ended() -> None:
    reel = Reel()
    reel.take(started("a", n=2))
    reel.take(sampled("a", 1, 10, choice=1))
    reel.take(finished("a", 2, choice=1))
    assert [call.call_id for call in reel.running] == ["a"]
    reel.take(finished("a", 3))
    assert not list(reel.running)


def test_calls_that_continue_are_told_from_those_that_begin() -> None:
    reel = Reel()
    reel.take(started("a"))
    second = reel.take(started("b", 1, parent="a"))
    assert isinstance(second, CallBegun)
    assert second.call.parent is reel.calls["a"]
    assert (reel.kept, reel.split) == (1, 1)


def test_weights_are_kept_where_they_come_into_force() -> None:
    reel = Reel()
    reel.take(started("a"))
    reel.take(sampled("a", 1, 10, 11, weight_version="1"))
    reel.take(sampled("a", 3, 12, weight_version="1"))
    reel.take(sampled("a", 4, 13, weight_version="2", boundary_uncertain=True))
    reel.take(sampled("a", 5, 14, weight_version="2", stale_cache=True))
    assert reel.calls["a"].choices[0].weights == [
        (0, Weights("1")),
        (3, Weights("2", boundary_uncertain=True)),
        (4, Weights("2", stale_cache=True)),
    ]
    assert reel.weights == Weights("2", stale_cache=True)


def test_a_failed_call_has_ended() -> None:
    reel = Reel()
    reel.take(started("a"))
    failed = tape_pb2.TapeEntry.CallFailed(call_id="a", message="out of memory")
    broken = reel.take(tape_pb2.TapeEntry(sequence=1, call_failed=failed))
    assert isinstance(broken, CallBroken)
    assert broken.message == "out of memory"
    assert (reel.failed, list(reel.running)) == (1, [])


def test_a_reel_may_begin_in_a_calls_middle() -> None:
    reel = Reel()
    grown = reel.take(sampled("a", 7, 10, text_pieces=["x"]))
    assert isinstance(grown, ChoiceGrown)
    assert grown.call.started is None
    assert grown.call.prompt_pieces() == []
    assert grown.choice.pieces == ["x"]
    child = reel.take(started("b", 8, parent="a"))
    assert isinstance(child, CallBegun)
    assert child.call.parent is grown.call


def test_entries_of_a_kind_that_is_not_known_pass_by() -> None:
    reel = Reel()
    assert reel.take(tape_pb2.TapeEntry(sequence=3)) is None
    assert reel.next_sequence == 4
