"""Receipts, and what their hash covers and what it does not."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence

import pytest

from support.tape_model import ABORT, STOP, Entry, ModelCall, Token, tape_of
from tokentape.v1 import types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.trajectory import Trajectory


def assemble(entries: Sequence[Entry]) -> Trajectory:
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    return assembler.trajectory()


def run(*ids: int, version: str = "1") -> tuple[Token, ...]:
    return tuple(Token(token_id, -token_id / 8, version) for token_id in ids)


CALLS = (
    ModelCall((1, 2), (run(10, 11),), cause=types_pb2.SPLIT_CAUSE_NEW_CONVERSATION),
    ModelCall((3,), (run(20),), (0, 0, 2)),
    ModelCall((3,), (run(30, version="2"),), (0, 0, 2)),
    ModelCall((4,), (run(40), run(50)), (0, 0, 1), reasons=(STOP, STOP)),
    ModelCall((5, 6), (run(60, 61, 62),), reasons=(ABORT,)),
    ModelCall((7,), (run(70),), cause=types_pb2.SPLIT_CAUSE_TOOLS_CHANGED),
)


def test_a_receipt_accounts_for_every_token_call_and_sample() -> None:
    receipt = assemble(tape_of(*CALLS)).receipt
    assert receipt.as_dict() | {"ledger_sha256": ""} == {
        "sampled": 10,
        "kept": 6,
        "dropped": {"superseded": 1, "abandoned": 3, "failed": 0},
        "samples": 4,
        "splits": {"new_conversation": 1, "fork": 2, "tools_changed": 1},
        "calls": 6,
        "weight_versions": ["1", "2"],
        "ledger_sha256": "",
    }
    assert (receipt.dropped_total, receipt.split_total) == (4, 3)
    assert json.loads(json.dumps(receipt.as_dict())) == receipt.as_dict()


def test_an_empty_tape_has_a_receipt() -> None:
    receipt = assemble(tape_of()).receipt
    assert (receipt.sampled, receipt.kept, receipt.samples, receipt.weight_versions) == (0, 0, 0, ())
    assert receipt.ledger_sha256 == hashlib.sha256(b"tokentape ledger 1\n").hexdigest()


def test_the_hash_is_what_the_document_says() -> None:
    """As docs/tape-file.md tells another implementation to make it."""
    call = ModelCall((1, 2), (run(10, 11),), temperature=0.5, cause=types_pb2.SPLIT_CAUSE_NEW_CONVERSATION)
    line = (
        '{"call":0,"choices":[{"finish_reason":"stop","logprobs":"' + struct.pack("<2f", -1.25, -1.375).hex() + '",'
        '"stop_reason":null,"token_ids":"0a0000000b000000","weight_runs":[[0,"1",false,false]]}],"parent":null,'
        '"prompt_token_ids":"0100000002000000","sampling":{"n":1,"temperature":0.5},"split_cause":"new_conversation"}'
    )
    expected = hashlib.sha256(f"tokentape ledger 1\n{line}\n".encode()).hexdigest()
    assert assemble(tape_of(call)).receipt.ledger_sha256 == expected


def started(entries: list[Entry], index: int) -> Entry.CallStarted:
    return next(entry.call_started for entry in entries if entry.call_started.call_id == f"call-{index}")


def first_run(entries: list[Entry]) -> Entry.TokensSampled:
    return next(entry.tokens_sampled for entry in entries if entry.HasField("tokens_sampled"))


def first_end(entries: list[Entry]) -> types_pb2.Completion:
    return next(entry.choice_finished.completion for entry in entries if entry.HasField("choice_finished"))


def change_a_token(entries: list[Entry]) -> None:
    first_run(entries).token_ids[0] += 1


def change_a_logprob(entries: list[Entry]) -> None:
    first_run(entries).logprobs[0] -= 1e-6


def change_a_prompt(entries: list[Entry]) -> None:
    started(entries, 0).prompt_token_ids[0] += 1


def change_a_parameter(entries: list[Entry]) -> None:
    started(entries, 0).sampling.top_p = 0.5


def change_a_version(entries: list[Entry]) -> None:
    first_run(entries).weight_version = "0"


def change_a_mark(entries: list[Entry]) -> None:
    first_run(entries).stale_cache = True


def change_a_cause(entries: list[Entry]) -> None:
    started(entries, 0).split_cause = types_pb2.SPLIT_CAUSE_TEMPLATE_ERROR


def change_an_adapter(entries: list[Entry]) -> None:
    started(entries, 5).lora_name = "math"


def change_an_end(entries: list[Entry]) -> None:
    first_end(entries).finish_reason = types_pb2.FINISH_REASON_LENGTH


def change_a_stop_reason(entries: list[Entry]) -> None:
    first_end(entries).stop_string = "END"


@pytest.mark.parametrize(
    "change",
    [
        change_a_token,
        change_a_logprob,
        change_a_prompt,
        change_a_parameter,
        change_a_version,
        change_a_mark,
        change_a_cause,
        change_an_adapter,
        change_an_end,
        change_a_stop_reason,
    ],
)
def test_the_hash_changes_with(change: Callable[[list[Entry]], None]) -> None:
    entries = tape_of(*CALLS)
    change(entries)
    assert assemble(entries).receipt.ledger_sha256 != hash_of(tape_of(*CALLS))


def hash_of(entries: Sequence[Entry]) -> str:
    return assemble(entries).receipt.ledger_sha256


def test_the_hash_does_not_depend_on_call_ids_or_anchors() -> None:
    entries = tape_of(*CALLS)
    for entry in entries:
        for name in ("call_started", "tokens_sampled", "choice_finished"):
            if entry.HasField(name):
                getattr(entry, name).call_id += "-elsewhere"
        if entry.HasField("call_started"):
            entry.call_started.anchor = "opaque"
            if entry.call_started.HasField("parent"):
                entry.call_started.parent.call_id += "-elsewhere"
    assert hash_of(entries) == hash_of(tape_of(*CALLS))
    assert assemble(entries).samples == assemble(tape_of(*CALLS)).samples


def test_an_offset_that_keeps_everything_is_the_same_as_none() -> None:
    entries = tape_of(*CALLS)
    started(entries, 1).parent.offset = 2
    assert hash_of(entries) == hash_of(tape_of(*CALLS))
