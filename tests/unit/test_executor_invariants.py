"""The invariants that the executor sees, on random rollouts whose tapes are written in every order and chunking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.invariants import CHECKS, fates
from support.tape_model import Entry, ModelCall, rollouts, write
from tokentape_executor.assembler import Assembler, positions
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.trajectory import Trajectory


def assemble(entries: Sequence[Entry]) -> Trajectory:
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    return assembler.trajectory()


@pytest.mark.parametrize("invariant", CHECKS)
@settings(max_examples=100)
@given(calls=rollouts(), data=st.data())
def test_invariant(invariant: str, calls: list[ModelCall], data: st.DataObject) -> None:
    CHECKS[invariant](calls, assemble(write(calls, data)))


@settings(max_examples=150)
@given(rollouts(), st.data())
def test_invariant_7_chunks_and_interleaving_make_no_difference(calls: list[ModelCall], data: st.DataObject) -> None:
    one, other = assemble(write(calls, data)), assemble(write(calls, data))
    assert one == other
    assert one.receipt.ledger_sha256 == other.receipt.ledger_sha256


def resumed(entries: list[Entry], from_sequence: int) -> list[Entry]:
    """What a sidecar sends to a watcher that resumes: entries from there on, a run cut where it must be."""
    rest: list[Entry] = []
    for entry in entries:
        skipped = from_sequence - entry.sequence
        if skipped <= 0:
            rest.append(entry)
        elif skipped < positions(entry):
            part = Entry()
            part.CopyFrom(entry)
            part.sequence = from_sequence
            del part.tokens_sampled.token_ids[:skipped], part.tokens_sampled.logprobs[:skipped]
            rest.append(part)
    return rest


@settings(max_examples=100)
@given(rollouts(), st.data())
def test_invariant_7_reconnects_make_no_difference(calls: list[ModelCall], data: st.DataObject) -> None:
    entries = write(calls, data)
    assembler = Assembler()
    while not assembler.sealed:
        # A run may arrive in part: the connection broke, and what came of it has been taken.
        arriving = resumed(entries, assembler.next_sequence)[: data.draw(st.integers(1, 4))]
        for entry in arriving:
            kept = data.draw(st.integers(1, positions(entry)))
            part = Entry()
            part.CopyFrom(entry)
            if kept < positions(entry):
                del part.tokens_sampled.token_ids[kept:], part.tokens_sampled.logprobs[kept:]
            assembler.feed(part)
            if kept < positions(entry):
                break
    assert assembler.trajectory() == assemble(entries)


@settings(max_examples=100)
@given(rollouts(), st.data())
def test_invariant_7_a_missing_a_repeated_or_a_swapped_entry_is_noticed(
    calls: list[ModelCall], data: st.DataObject
) -> None:
    entries = write(calls, data)
    index = data.draw(st.integers(0, len(entries) - 1))
    damage = data.draw(st.sampled_from(["drop", "repeat", "swap"]))
    if damage == "drop":
        broken = entries[:index] + entries[index + 1 :]
    elif damage == "repeat":
        broken = entries[: index + 1] + entries[index:]
    else:
        broken = entries[:index] + entries[index : index + 2][::-1] + entries[index + 2 :]
    if broken != entries:
        with pytest.raises(TapeInconsistent):
            assemble(broken)


@settings(max_examples=300)
@given(rollouts(), st.data())
def test_invariant_10_what_is_dropped_is_continued_by_nothing_that_is_kept(
    calls: list[ModelCall], data: st.DataObject
) -> None:
    trajectory = assemble(write(calls, data))
    dropped = {place for place, fate in fates(calls).items() if fate.reason is not None}
    for sample in trajectory.samples:
        for index in sample.call_indices:
            parent = calls[index].parent
            assert parent is None or parent[:2] not in dropped
