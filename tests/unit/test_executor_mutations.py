"""Mutation check: damage on the way from the engine to the samples is found, and found by the invariant it breaks.

Each mutation sits between a rollout and its samples and is made consistent in itself (sequence numbers and counts are
put right), so that nothing but the named invariants can notice. Without that, the assembler refuses the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from support.invariants import violated
from support.tape_model import ABORT, LENGTH, STOP, Entry, ModelCall, Token, Writer, sealed, tape_of
from tokentape.v1 import types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.trajectory import Sample, Trajectory


def run(*ids: int, version: str = "1") -> tuple[Token, ...]:
    return tuple(Token(token_id, -token_id / 8, version) for token_id in ids)


ROLLOUT = [
    ModelCall((1, 2, 3), (run(10, 11, 12, 13),), cause=types_pb2.SPLIT_CAUSE_NEW_CONVERSATION),
    ModelCall((4, 5), (run(20, 21, 22),), (0, 0, 4)),
    ModelCall((4, 5), (run(30, 31) + run(32, 33, version="2"),), (0, 0, 4)),  # the retry of the one before
    ModelCall((6,), (run(40, 41), run(50, 51, 52)), (2, 0, 4), reasons=(STOP, LENGTH)),
    ModelCall((7,), (run(60, 61),), (3, 1, 2)),  # a fork
    ModelCall((8, 9), (run(70, 71),), cause=types_pb2.SPLIT_CAUSE_HISTORY_EDITED),
    ModelCall((9,), (run(80, 81),), (5, 0, 2), reasons=(ABORT,)),
]


def merged() -> list[Entry]:
    """The rollout's tape, a run an entry."""
    writer = Writer()
    for entry in tape_of(*ROLLOUT):
        new = entry.tokens_sampled
        old = writer.entries[-1].tokens_sampled if writer.entries else new
        key = (new.call_id, new.choice, new.weight_version)
        if entry.HasField("tokens_sampled") and key == (old.call_id, old.choice, old.weight_version):
            old.token_ids.extend(new.token_ids)
            old.logprobs.extend(new.logprobs)
            writer.sequence += len(new.token_ids)
        else:
            writer.add(entry)
    return writer.entries


def consistent(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with sequence numbers, counts and prompts' lengths as the contract has them."""
    writer = Writer()
    prompts: dict[str, int] = {}
    counts: dict[tuple[str, int], int] = {}
    for entry in entries:
        match entry.WhichOneof("entry"):
            case "call_started":
                start = entry.call_started
                before = 0
                if start.HasField("parent"):
                    whole = counts.get((start.parent.call_id, start.parent.choice), 0)
                    kept = min(start.parent.offset, whole) if start.parent.HasField("offset") else whole
                    before = prompts[start.parent.call_id] + kept
                prompts[start.call_id] = start.prompt_token_count = before + len(start.prompt_token_ids)
            case "tokens_sampled":
                key = (entry.tokens_sampled.call_id, entry.tokens_sampled.choice)
                counts[key] = counts.get(key, 0) + len(entry.tokens_sampled.token_ids)
            case "choice_finished":
                completion = entry.choice_finished.completion
                completion.token_count = counts.get((entry.choice_finished.call_id, completion.choice), 0)
            case "tape_sealed":
                entry = sealed(len(prompts), sum(counts.values()))  # noqa: PLW2901 - written anew
            case _:
                pass
        writer.add(entry)
    return writer.entries


def assemble(entries: Iterable[Entry]) -> Trajectory:
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    return assembler.trajectory()


def long_run(entries: list[Entry]) -> Entry.TokensSampled:
    """The first run, of the first call: four tokens."""
    return next(entry.tokens_sampled for entry in entries if entry.HasField("tokens_sampled"))


def shift_ids_by_one(entries: list[Entry]) -> None:
    ids = long_run(entries).token_ids
    ids[:] = [*ids[1:], ids[0]]


def drop_a_token(entries: list[Entry]) -> None:
    sampled = long_run(entries)
    del sampled.token_ids[1], sampled.logprobs[1]


def drop_the_stop_token(entries: list[Entry]) -> None:
    sampled = long_run(entries)
    del sampled.token_ids[-1], sampled.logprobs[-1]


def drop_a_delta(entries: list[Entry]) -> None:
    entries.remove(next(entry for entry in entries if entry.HasField("tokens_sampled")))


def repeat_a_delta(entries: list[Entry]) -> None:
    index = next(i for i, entry in enumerate(entries) if entry.HasField("tokens_sampled"))
    again = Entry()
    again.CopyFrom(entries[index])
    entries.insert(index + 1, again)


def swap_logprobs(entries: list[Entry]) -> None:
    values = long_run(entries).logprobs
    values[1], values[2] = values[2], values[1]


def shift_logprobs_by_one(entries: list[Entry]) -> None:
    values = long_run(entries).logprobs
    values[:] = [0.0, *values[:-1]]


def swap_choices(entries: list[Entry]) -> None:
    for entry in entries:
        if entry.tokens_sampled.call_id == "call-3":
            entry.tokens_sampled.choice = 1 - entry.tokens_sampled.choice


def forget_versions(entries: list[Entry]) -> None:
    for entry in entries:
        if entry.HasField("tokens_sampled"):
            entry.tokens_sampled.weight_version = "2"


def forget_a_parent(entries: list[Entry]) -> None:
    start = next(entry.call_started for entry in entries if entry.call_started.call_id == "call-2")
    start.ClearField("parent")
    start.prompt_token_ids[:] = [1, 2, 3, 10, 11, 12, 13, 4, 5]


def change_the_prompt(entries: list[Entry]) -> None:
    entries[0].call_started.prompt_token_ids[1] += 1


def forget_an_abort(entries: list[Entry]) -> None:
    finish = next(entry.choice_finished for entry in entries if entry.choice_finished.call_id == "call-6")
    finish.completion.finish_reason = types_pb2.FINISH_REASON_STOP


ON_THE_TAPE: dict[Callable[[list[Entry]], None], set[str]] = {
    shift_ids_by_one: {"1 prompt and completion"},
    drop_a_token: {"1 prompt and completion", "2 conservation"},
    drop_the_stop_token: {"1 prompt and completion", "2 conservation"},
    drop_a_delta: {"1 prompt and completion", "2 conservation"},
    repeat_a_delta: {"1 prompt and completion", "2 conservation"},
    swap_logprobs: {"3 log-probabilities"},
    shift_logprobs_by_one: {"3 log-probabilities"},
    swap_choices: {"1 prompt and completion", "3 log-probabilities"},
    forget_versions: {"8 versions"},
    forget_a_parent: {"2 conservation"},
    change_the_prompt: {"1 prompt and completion"},
    forget_an_abort: {"2 conservation"},
}


def test_the_rollout_as_it_is_breaks_nothing() -> None:
    assert violated(ROLLOUT, assemble(merged())) == set()
    assert violated(ROLLOUT, assemble(consistent(merged()))) == set()


@pytest.mark.parametrize(("mutate", "expected"), ON_THE_TAPE.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_mutation_on_the_tape(mutate: Callable[[list[Entry]], None], expected: set[str]) -> None:
    entries = merged()
    mutate(entries)
    assert expected <= violated(ROLLOUT, assemble(consistent(entries)))


@pytest.mark.parametrize("mutate", [drop_a_token, drop_the_stop_token, drop_a_delta, repeat_a_delta])
def test_mutation_that_is_not_made_consistent_is_refused(mutate: Callable[[list[Entry]], None]) -> None:
    entries = merged()
    mutate(entries)
    with pytest.raises(TapeInconsistent):
        assemble(entries)


def with_first(trajectory: Trajectory, change: Callable[[Sample], Sample]) -> Trajectory:
    first, *others = trajectory.samples
    return replace(trajectory, samples=[change(first), *others])


def moved(sample: Sample, start: int, end: int) -> Sample:
    first, *others = sample.actions
    return replace(sample, actions=[replace(first, start=first.start + start, end=first.end + end), *others])


IN_THE_ASSEMBLER: dict[str, tuple[Callable[[Sample], Sample], set[str]]] = {
    "a range begins late": (lambda sample: moved(sample, 1, 0), {"1 prompt and completion", "2 conservation"}),
    "a range takes in template glue": (lambda sample: moved(sample, 0, 1), {"1 prompt and completion"}),
    "a range is one off": (lambda sample: moved(sample, 1, 1), {"1 prompt and completion"}),
    "a range leaves out the stop token": (lambda sample: moved(sample, 0, -1), {"2 conservation", "8 versions"}),
    "log-probabilities are one off": (
        lambda sample: replace(sample, logprobs=[*sample.logprobs[1:], 0.0]),
        {"3 log-probabilities"},
    ),
    "an inner turn is lost": (lambda sample: replace(sample, actions=sample.actions[1:]), {"2 conservation"}),
    "the last token is cut": (
        lambda sample: replace(sample, tokens=sample.tokens[:-1]),
        {"1 prompt and completion", "5 actions"},
    ),
    "versions are one off": (
        lambda sample: replace(
            sample, version_spans=[replace(each, start=each.start + 1) for each in sample.version_spans]
        ),
        {"8 versions"},
    ),
    "the cause is lost": (lambda sample: replace(sample, split_cause=type(sample.split_cause).FORK), {"4 parents"}),
}


@pytest.mark.parametrize("name", IN_THE_ASSEMBLER)
def test_mutation_of_a_sample(name: str) -> None:
    change, expected = IN_THE_ASSEMBLER[name]
    assert expected <= violated(ROLLOUT, with_first(assemble(merged()), change))


def test_mutation_of_the_receipt_is_refused_by_itself() -> None:
    receipt = assemble(merged()).receipt
    with pytest.raises(TapeInconsistent, match="were sampled, but"):
        replace(receipt, kept=receipt.kept - 1)
    with pytest.raises(TapeInconsistent, match="samples begin for"):
        replace(receipt, samples=receipt.samples + 1)
