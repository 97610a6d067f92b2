"""Tapes that contradict the contract are refused, with the contradiction; nothing is repaired."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from support.tape_model import STOP, Entry, ModelCall, Token, failed, finished, sealed, started, tape_of, tokens
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.trajectory import Trajectory


def assemble(entries: Sequence[Entry]) -> Trajectory:
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    return assembler.trajectory()


def run(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(token_id, -float(token_id)) for token_id in ids)


def damaged(index: int, damage: Entry) -> list[Entry]:
    entries = tape_of(ModelCall((1, 2), (run(10, 11),)))
    sequence = entries[index].sequence
    entries[index] = damage
    entries[index].sequence = sequence
    return entries


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (damaged(1, Entry(tokens_sampled=Entry.TokensSampled(call_id="call-0", token_ids=[10]))), "log-probabilities"),
        (damaged(1, tokens(0, 0, [Token(10, math.nan)])), "finite"),
        (damaged(1, tokens(0, 0, [Token(10, -math.inf)])), "finite"),
        (damaged(1, tokens(7, 0, [Token(10, -1)])), "call-7 has not started"),
        (damaged(1, tokens(0, 1, [Token(10, -1)])), "no choice 1"),
        (damaged(1, Entry(tokens_sampled=Entry.TokensSampled(call_id="call-0"))), "sampled no token"),
        (damaged(1, Entry()), "does not know"),
        (damaged(1, finished(0, 0, STOP, 0)), "after its end"),
        (damaged(3, finished(0, 0, STOP, 3)), "finished with 3 tokens, 2 came"),
        (damaged(3, finished(0, 0, 0, 2)), "no known reason"),
        (damaged(3, tokens(0, 0, [Token(10, -1)])), "while call call-0 is running"),
        (damaged(4, sealed(1, 3)), "counts 1 calls and 3 tokens"),
        (damaged(4, sealed(2, 2)), "counts 2 calls"),
        (damaged(4, failed(0)), "fails after its end"),
        (damaged(0, started([ModelCall((), (run(10, 11),))], 0)), "the prompt of call call-0"),
        (tape_of(ModelCall((1,), (run(10),)))[:-1], "not sealed"),
    ],
)
def test_what_contradicts_the_contract_is_refused(entries: list[Entry], problem: str) -> None:
    with pytest.raises(TapeInconsistent, match=problem):
        assemble(entries)


def test_a_prompt_that_is_not_its_parents_continuation_is_refused() -> None:
    entries = tape_of(ModelCall((1,), (run(10),)), ModelCall((2,), (run(20),), parent=(0, 0, 1)))
    start = next(entry for entry in entries[1:] if entry.HasField("call_started"))
    start.call_started.prompt_token_count += 1
    with pytest.raises(TapeInconsistent, match=r"has 2 \+ 1 tokens, not 4"):
        assemble(entries)
    start.call_started.parent.offset = 2
    with pytest.raises(TapeInconsistent, match="keeps 2 of its parent's 1 tokens"):
        assemble(entries)


@pytest.mark.parametrize("lora_name", ["code", ""])
def test_a_call_that_goes_on_from_another_adapters_is_refused(lora_name: str) -> None:
    calls = (
        ModelCall((1,), (run(10),), lora_name="math"),
        ModelCall((2,), (run(20),), parent=(0, 0, 1), lora_name=lora_name),
    )
    with pytest.raises(TapeInconsistent, match=f"call-1 of the LoRA adapter '{lora_name}' continues one of 'math'"):
        assemble(tape_of(*calls))


def test_e11_missing_prompt_ids_are_an_error_and_never_an_empty_prompt() -> None:
    entries = tape_of(ModelCall((1, 2), (run(10),)))
    del entries[0].call_started.prompt_token_ids[:]
    with pytest.raises(TapeInconsistent, match=r"has 0 \+ 0 tokens, not 2"):
        assemble(entries)


def test_nothing_follows_the_seal() -> None:
    entries = tape_of(ModelCall((1,), (run(10),)))
    extra = sealed(1, 1)
    extra.sequence = entries[-1].sequence + 1
    with pytest.raises(TapeInconsistent, match="follows the seal"):
        assemble([*entries, extra])
