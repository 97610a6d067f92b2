"""The assembler's rules one by one, on small rollouts. Random ones are in `test_executor_invariants.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.tape_model import (
    ABORT,
    FAIL,
    LENGTH,
    STOP,
    Entry,
    ModelCall,
    Token,
    tape_of,
)
from tokentape.v1 import types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.receipt import DropReason, SplitCause
from tokentape_executor.trajectory import FinishReason, ParentLink, Trajectory, VersionSpan


def assemble(entries: Sequence[Entry]) -> Trajectory:
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    return assembler.trajectory()


def dropped(trajectory: Trajectory) -> dict[str, int]:
    return {reason: count for reason, count in trajectory.receipt.dropped.items() if count}


def run(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(token_id, -float(token_id)) for token_id in ids)


def test_a_conversation_is_one_sample() -> None:
    (sample,) = assemble(
        tape_of(
            ModelCall((1, 2), (run(10, 11),)),
            ModelCall((3,), (run(12),), parent=(0, 0, 2)),
            ModelCall((4, 5), (run(13, 14),), parent=(1, 0, 1), reasons=(LENGTH,)),
        )
    ).samples

    assert sample.tokens == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert sample.action_ranges == [(2, 4), (5, 6), (8, 10)]
    assert sample.logprobs == [0, 0, -10, -11, 0, -12, 0, 0, -13, -14]
    assert sample.call_indices == [0, 1, 2]
    assert (sample.finish_reason, sample.truncated) == (FinishReason.LENGTH, True)
    assert (sample.split_cause, sample.parent) == (SplitCause.UNSPECIFIED, None)
    assert [action.finish_reason for action in sample.actions] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]


def test_the_same_ids_without_a_parent_are_a_new_sample() -> None:
    first, second = assemble(tape_of(ModelCall((1,), (run(10),)), ModelCall((1, 10, 2), (run(11),)))).samples

    assert (first.tokens, first.action_ranges) == ([1, 10], [(1, 2)])
    assert (second.tokens, second.action_ranges) == ([1, 10, 2, 11], [(3, 4)])


def test_a_fork_has_the_shared_part_as_prompt() -> None:
    main, fork = assemble(
        tape_of(
            ModelCall((1,), (run(10, 11, 12),)),
            ModelCall((2,), (run(20),), parent=(0, 0, 3)),
            ModelCall((3,), (run(30),), parent=(0, 0, 1)),
        )
    ).samples

    assert (main.tokens, main.action_ranges) == ([1, 10, 11, 12, 2, 20], [(1, 4), (5, 6)])
    assert (fork.tokens, fork.action_ranges) == ([1, 10, 3, 30], [(3, 4)])
    assert fork.logprobs == [0, 0, 0, -30]
    assert (fork.split_cause, fork.parent) == (SplitCause.FORK, ParentLink(sample=0, token_count=2))
    assert main.parent is None


@pytest.mark.parametrize("first_reason", [STOP, LENGTH, ABORT, FAIL])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_repeated_request_is_superseded_by_its_repetition(first_reason: int | None, *, goes_on: bool) -> None:
    calls = [
        ModelCall((1,), (run(10),)),
        ModelCall((2,), (run(20, 22),), parent=(0, 0, 1), reasons=(first_reason,)),
        ModelCall((2,), (run(21),), parent=(0, 0, 1)),
        ModelCall((3,), (run(30),), parent=(2, 0, 1)),
    ]
    trajectory = assemble(tape_of(*(calls if goes_on else calls[:3])))

    (sample,) = trajectory.samples
    assert sample.tokens == [1, 10, 2, 21, *([3, 30] if goes_on else [])]
    assert sample.action_ranges == [(1, 2), (3, 4), *([(5, 6)] if goes_on else [])]
    assert dropped(trajectory) == {"superseded": 2}


def test_of_three_equal_requests_the_last_counts_and_those_that_were_continued() -> None:
    trajectory = assemble(
        tape_of(
            ModelCall((1,), (run(10),)),
            ModelCall((1,), (run(20),)),
            ModelCall((1,), (run(30),)),
            ModelCall((2,), (run(40),), parent=(0, 0, 1)),
        )
    )
    assert [sample.tokens for sample in trajectory.samples] == [[1, 10, 2, 40], [1, 30]]
    assert dropped(trajectory) == {"superseded": 1}


def test_an_abandoned_repetition_takes_nothing_from_the_answer() -> None:
    trajectory = assemble(
        tape_of(
            ModelCall((1,), (run(10),)),
            ModelCall((2,), (run(20),), parent=(0, 0, 1)),
            ModelCall((2,), (run(21, 22),), parent=(0, 0, 1), reasons=(ABORT,)),
        )
    )
    (sample,) = trajectory.samples
    assert (sample.tokens, sample.action_ranges) == ([1, 10, 2, 20], [(1, 2), (3, 4)])
    assert dropped(trajectory) == {"abandoned": 2}


def test_other_parameters_another_place_or_other_ids_make_no_siblings() -> None:
    first = ModelCall((1,), (run(10, 11),))
    trajectory = assemble(
        tape_of(
            first,
            ModelCall((2,), (run(20),), parent=(0, 0, 2)),
            ModelCall((2,), (run(21),), parent=(0, 0, 2), temperature=0.5),
            ModelCall((2,), (run(22),), parent=(0, 0, 1)),
            ModelCall((3,), (run(23),), parent=(0, 0, 2)),
            ModelCall((2,), (run(24), run(25)), parent=(0, 0, 2), reasons=(STOP, STOP)),
        )
    )
    assert dropped(trajectory) == {}
    assert len(trajectory.samples) == 6


def test_a_sample_is_of_one_adapter_and_the_same_request_to_another_makes_no_sibling() -> None:
    trajectory = assemble(
        tape_of(
            ModelCall((1,), (run(10),), lora_name="math"),
            ModelCall((1,), (run(11),)),
            ModelCall((1,), (run(12),), lora_name="code"),
            ModelCall((2,), (run(20),), parent=(0, 0, 1), lora_name="math"),
        )
    )
    assert dropped(trajectory) == {}
    assert [(sample.lora_name, sample.tokens) for sample in trajectory.samples] == [
        ("math", [1, 10, 2, 20]),
        ("", [1, 11]),
        ("code", [1, 12]),
    ]


def test_the_same_parameters_in_another_order_are_the_same() -> None:
    entries = tape_of(ModelCall((1,), (run(10),)), ModelCall((1,), (run(11),)))
    first, second = (entry.call_started.sampling for entry in entries if entry.HasField("call_started"))
    first.logit_bias.update(dict.fromkeys(range(100), 1.0))
    second.logit_bias.update(dict.fromkeys(reversed(range(100)), 1.0))
    assert dropped(assemble(entries)) == {"superseded": 1}


@pytest.mark.parametrize(("reason", "name"), [(ABORT, DropReason.ABANDONED), (FAIL, DropReason.FAILED)])
def test_what_nobody_saw_the_end_of_is_dropped(reason: int | None, name: DropReason) -> None:
    trajectory = assemble(
        tape_of(ModelCall((1,), (run(10),)), ModelCall((2,), (run(20, 21),), parent=(0, 0, 1), reasons=(reason,)))
    )
    (sample,) = trajectory.samples
    assert (sample.tokens, sample.finish_reason) == ([1, 10], FinishReason.STOP)
    assert trajectory.receipt.dropped == dict.fromkeys(DropReason, 0) | {name: 2}


def test_an_aborted_call_that_is_continued_is_kept() -> None:
    trajectory = assemble(
        tape_of(ModelCall((1,), (run(10, 11, 12),), reasons=(ABORT,)), ModelCall((2,), (run(20),), parent=(0, 0, 2)))
    )
    kept, fork = trajectory.samples
    assert (kept.tokens, kept.finish_reason) == ([1, 10, 11, 12], FinishReason.ABORT)
    assert (fork.tokens, fork.action_ranges) == ([1, 10, 11, 2, 20], [(4, 5)])
    assert fork.parent == ParentLink(sample=0, token_count=3)


def test_an_abandoned_call_loses_all_of_its_choices_but_those_that_are_continued() -> None:
    choices = (run(10), run(20, 21), run(30, 31, 32))
    lost = assemble(tape_of(ModelCall((1,), choices, reasons=(STOP, ABORT, ABORT))))
    assert (lost.samples, dropped(lost)) == ([], {"abandoned": 6})

    call = ModelCall((1,), choices, reasons=(STOP, ABORT, ABORT))
    trajectory = assemble(tape_of(call, ModelCall((2,), (run(40),), parent=(0, 1, 2))))
    assert [sample.tokens for sample in trajectory.samples] == [[1, 10], [1, 20, 21, 2, 40]]
    assert dropped(trajectory) == {"abandoned": 3}


def test_of_two_branches_that_went_on_the_longer_lived_keeps_the_common_part() -> None:
    main, side = assemble(
        tape_of(
            ModelCall((1,), (run(10),)),
            ModelCall((2,), (run(20),), parent=(0, 0, 1)),
            ModelCall((3,), (run(30),), parent=(0, 0, 1)),
            ModelCall((4,), (run(40),), parent=(2, 0, 1)),
            ModelCall((5,), (run(50),), parent=(1, 0, 1)),
        )
    ).samples
    assert main.tokens == [1, 10, 2, 20, 5, 50]
    assert (side.tokens, side.action_ranges) == ([1, 10, 3, 30, 4, 40], [(3, 4), (5, 6)])
    assert side.parent == ParentLink(sample=0, token_count=2)


def test_each_of_n_choices_is_a_sample_and_can_be_continued() -> None:
    samples = assemble(
        tape_of(
            ModelCall((1, 2), (run(10), run(20), run(30, 31)), reasons=(STOP, STOP, LENGTH)),
            ModelCall((3,), (run(40),), parent=(0, 1, 1)),
        )
    ).samples

    assert [sample.tokens for sample in samples] == [[1, 2, 10], [1, 2, 20, 3, 40], [1, 2, 30, 31]]
    assert [sample.action_ranges for sample in samples] == [[(2, 3)], [(2, 3), (4, 5)], [(2, 4)]]


def test_choices_are_no_siblings_of_each_other() -> None:
    same = (run(10), run(10))
    trajectory = assemble(tape_of(ModelCall((1,), same, reasons=(STOP, STOP))))
    assert [sample.tokens for sample in trajectory.samples] == [[1, 10], [1, 10]]


def test_n_choices_that_continue_a_completion_are_one_turn_and_forks() -> None:
    main, fork = assemble(
        tape_of(
            ModelCall((1,), (run(10),)), ModelCall((2,), (run(20), run(30)), parent=(0, 0, 1), reasons=(STOP, STOP))
        )
    ).samples
    assert (main.tokens, main.action_ranges) == ([1, 10, 2, 20], [(1, 2), (3, 4)])
    assert (fork.tokens, fork.action_ranges) == ([1, 10, 2, 30], [(3, 4)])
    assert fork.parent == ParentLink(sample=0, token_count=2)


@pytest.mark.parametrize("reason", [STOP, LENGTH, ABORT, FAIL])
def test_a_call_without_a_token_leaves_no_sample_unless_it_is_continued(reason: int | None) -> None:
    empty = ModelCall((1,), ((),), reasons=(reason,))
    alone = assemble(tape_of(empty))
    assert (alone.samples, alone.receipt.sampled, alone.receipt.calls) == ([], 0, 1)

    (sample,) = assemble(tape_of(empty, ModelCall((2,), (run(10),), parent=(0, 0, 0)))).samples
    assert (sample.tokens, sample.action_ranges) == ([1, 2, 10], [(2, 3)])
    assert sample.call_indices == [0, 1]


def test_a_sample_says_why_it_begins() -> None:
    names = dict(types_pb2.SplitCause.items())
    calls = [ModelCall((index + 1,), (run(10),), cause=number) for index, number in enumerate(names.values())]
    entries = tape_of(*calls)
    trajectory = assemble(entries)
    assert [f"SPLIT_CAUSE_{sample.split_cause.name}" for sample in trajectory.samples] == list(names)

    entries[0].call_started.split_cause = 99  # pyright: ignore[reportAttributeAccessIssue] # from a later contract
    assert assemble(entries).samples[0].split_cause is SplitCause.UNSPECIFIED


def test_marks_of_weight_changes_are_kept_with_their_tokens() -> None:
    sampled = (
        Token(10, -1, "1"),
        Token(11, -1, "2", uncertain=True),
        Token(12, -1, "2", uncertain=True),
        Token(13, -1, "2", uncertain=True, stale=True),
    )
    (sample,) = assemble(tape_of(ModelCall((1, 2), (sampled,)))).samples
    assert sample.version_spans == [
        VersionSpan(2, 3, "1"),
        VersionSpan(3, 5, "2", boundary_uncertain=True),
        VersionSpan(5, 6, "2", boundary_uncertain=True, stale_cache=True),
    ]
