"""DESIGN.md's invariants, as far as the executor sees them, as checks of a trajectory against the rollout it is of.

Each check is written from the invariant's words alone, against the plain data of `tape_model`, and by other means than
the executor's: per token and call by call, without following samples. `violated` names those that fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from support.tape_model import ABORT, FAIL, LENGTH, ModelCall, Token, prompt_of
from tokentape.v1 import types_pb2
from tokentape_executor.trajectory import Sample, Trajectory

Place = tuple[int, int]
"""A call and one of its choices."""


@dataclass(frozen=True)
class Fate:
    """What the reference says of one choice: dropped with a reason, or kept."""

    reason: str | None


def fates(calls: Sequence[ModelCall]) -> dict[Place, Fate]:
    """What invariant 10 makes of every choice."""
    return {
        (index, choice): Fate(_reason(calls, index, choice))
        for index, call in enumerate(calls)
        for choice in range(len(call.choices))
    }


def _reason(calls: Sequence[ModelCall], index: int, choice: int) -> str | None:
    call = calls[index]
    if not _has_child(calls, index):
        later = [other for other in range(index + 1, len(calls)) if _are_siblings(call, calls[other])]
        if any(_answered(calls[other]) or _has_child(calls, other) for other in later):
            return "superseded"
        if FAIL in call.reasons:
            return "failed"
        return "abandoned" if ABORT in call.reasons else None
    if _is_continued(calls, index, choice):
        return None
    if call.reasons[choice] == ABORT:
        return "abandoned"
    return "failed" if call.reasons[choice] is FAIL else None


def _are_siblings(one: ModelCall, other: ModelCall) -> bool:
    return (one.prompt, one.parent, one.temperature, len(one.choices)) == (
        other.prompt,
        other.parent,
        other.temperature,
        len(other.choices),
    )


def _answered(call: ModelCall) -> bool:
    return not {ABORT, FAIL} & set(call.reasons)


def _has_child(calls: Sequence[ModelCall], index: int) -> bool:
    return any(call.parent is not None and call.parent[0] == index for call in calls)


def _is_continued(calls: Sequence[ModelCall], index: int, choice: int) -> bool:
    return any(call.parent is not None and call.parent[:2] == (index, choice) for call in calls)


def _tokens(sample: Sample, start: int, end: int) -> list[Token]:
    spans = {p: span for span in sample.version_spans for p in range(span.start, span.end)}
    return [
        Token(
            sample.tokens[p],
            sample.logprobs[p],
            spans[p].weight_version,
            spans[p].boundary_uncertain,
            spans[p].stale_cache,
        )
        for p in range(start, end)
    ]


def check_1(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """Each range's tokens before it are the engine's prompt, those in it what it sampled."""
    for sample in trajectory.samples:
        for action in sample.actions:
            sampled = calls[action.call_index].choices[action.choice]
            assert sample.tokens[: action.start] == prompt_of(calls, action.call_index)
            assert sample.tokens[action.start : action.end] == [token.token_id for token in sampled]


def check_2(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """Every sampled token is in one range of one sample, or counted as dropped; the receipt says how many of each."""
    kept = Counter((action.call_index, action.choice) for sample in trajectory.samples for action in sample.actions)
    expected = fates(calls)
    dropped: Counter[str] = Counter()
    for (index, choice), fate in expected.items():
        count = len(calls[index].choices[choice])
        assert kept[index, choice] == int(fate.reason is None and count > 0)
        if fate.reason is not None:
            dropped[fate.reason] += count
    receipt = trajectory.receipt
    assert receipt.sampled == sum(len(run) for call in calls for run in call.choices)
    assert {reason: count for reason, count in receipt.dropped.items() if count} == +dropped
    assert receipt.kept == receipt.sampled - dropped.total()
    in_ranges = [end - start for sample in trajectory.samples for start, end in sample.action_ranges]
    assert sum(in_ranges) == receipt.kept


def check_3(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """Log-probabilities are the sampled tokens' own, and 0.0 where nothing was sampled."""
    for sample in trajectory.samples:
        expected = [0.0] * len(sample.tokens)
        for action in sample.actions:
            sampled = calls[action.call_index].choices[action.choice]
            expected[action.start : action.end] = [token.logprob for token in sampled]
        assert sample.logprobs == expected


def check_4(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """Samples follow parents; one begins where there is none, with the tape's cause, or forks from a named place."""
    for sample in trajectory.samples:
        for before, after in zip(sample.call_indices, sample.call_indices[1:], strict=False):
            parent = calls[after].parent
            assert parent is not None
            assert parent[0] == before
            assert parent[2] == len(calls[before].choices[parent[1]])
        first = calls[sample.call_indices[0]]
        if first.parent is None:
            name = types_pb2.SplitCause.Name(first.cause).removeprefix("SPLIT_CAUSE_").lower()
            assert (sample.split_cause, sample.parent) == (name, None)
        else:
            assert sample.split_cause == "fork"
            assert sample.parent is not None
            origin, count = trajectory.samples[sample.parent.sample], sample.parent.token_count
            assert origin is not sample
            assert first.parent[0] in origin.call_indices
            assert count == len(prompt_of(calls, first.parent[0])) + first.parent[2]
            assert sample.tokens[:count] == origin.tokens[:count]
    assert trajectory.receipt.splits == Counter(sample.split_cause for sample in trajectory.samples)


def check_4_extends(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """No sample ends where a kept call continues it: what is continued in full goes on in its sample."""
    lasts = {(sample.call_indices[-1], sample.actions[-1].choice) for sample in trajectory.samples}
    for action in (action for sample in trajectory.samples for action in sample.actions):
        parent = calls[action.call_index].parent
        if parent is not None and parent[2] == len(calls[parent[0]].choices[parent[1]]):
            assert parent[:2] not in lasts


def check_5(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """A range ends with the last token that was sampled, stop token included; no sample has tokens after its last."""
    del calls
    for sample in trajectory.samples:
        assert sample.actions
        assert all(start < end for start, end in sample.action_ranges)
        assert sample.action_ranges == sorted(sample.action_ranges)
        if sample.call_indices[-1] == sample.actions[-1].call_index:
            assert sample.actions[-1].end == len(sample.tokens)


def check_8(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """Versions and their marks are per token, and cover the ranges exactly."""
    for sample in trajectory.samples:
        covered = [p for span in sample.version_spans for p in range(span.start, span.end)]
        assert covered == [p for start, end in sample.action_ranges for p in range(start, end)]
        for action in sample.actions:
            sampled = calls[action.call_index].choices[action.choice]
            assert _tokens(sample, action.start, action.end) == list(sampled)
    assert set(trajectory.receipt.weight_versions) == {
        token.version for call in calls for run in call.choices for token in run
    }


def check_truncated(calls: Sequence[ModelCall], trajectory: Trajectory) -> None:
    """A sample is truncated if a limit ended its last call."""
    for sample in trajectory.samples:
        action = sample.actions[-1]
        if action.call_index == sample.call_indices[-1]:
            assert sample.truncated == (calls[action.call_index].reasons[action.choice] == LENGTH)


CHECKS: dict[str, Callable[[Sequence[ModelCall], Trajectory], None]] = {
    "1 prompt and completion": check_1,
    "2 conservation": check_2,
    "3 log-probabilities": check_3,
    "4 parents": check_4,
    "4 extension": check_4_extends,
    "5 actions": check_5,
    "8 versions": check_8,
    "truncation": check_truncated,
}


def violated(calls: Sequence[ModelCall], trajectory: Trajectory) -> set[str]:
    """The names of the checks that fail."""
    failed: set[str] = set()
    for name, check in CHECKS.items():
        try:
            check(calls, trajectory)
        except (AssertionError, LookupError):
            failed.add(name)
    return failed
