"""The harness of `test_watch_guarantees` finds bugs: each is put into a copy of the store's own code, and has a name.

Nothing else is changed: engine, sockets, writers and watchers are those of the test that passes on the true store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from support.mutation import mutated
from support.watch_checks import violations
from support.watch_world import Shape, run_world
from tokentape_sidecar import call_reader, calls, choice_record, convert, tape, tape_servicer

SEEDS = 8
SHAPE = Shape(tapes=1, early_ends=0.5, deletes=0)


@dataclass(frozen=True, slots=True)
class Bug:
    """`new` for `old` in a function of `owner`."""

    owner: Any
    name: str
    old: str
    new: str
    breaks: frozenset[str]
    """Guarantees that must be named."""


def bug(owner: Any, name: str, old: str, new: str, *breaks: str) -> Bug:
    return Bug(owner, name, old, new, frozenset(breaks))


BUGS = {
    "an entry comes twice": bug(
        tape.Tape, "read", "entries.append(entry)", "entries.extend([entry] * (1 + (position % 17 == 5)))", "unique"
    ),
    "one is dropped at a wake-up": bug(
        tape_servicer,
        "_follow",
        "await tape.wait_changed()",
        "await tape.wait_changed(); position = min(position + 1, tape.end_sequence)",
        "complete",
    ),
    "two calls' entries change places": bug(
        tape.Tape,
        "read",
        "return entries, position",
        "return [*entries[:-2], *reversed(entries[-2:])], position",
        "ordered",
    ),
    "a watch that resumes repeats": bug(
        tape_servicer,
        "_follow",
        "first = True",
        "first = True; position = max(0, position - 1)",
        "resumable",
        "unique",
    ),
    "a watch that resumes within a run begins with its first token": bug(
        tape.Tape, "_entry", "log.offsets[row] + position - log.starts[row]", "log.offsets[row]", "resumable"
    ),
    "caught up is said too early": bug(
        tape_servicer, "_follow", "position == tape.end_sequence", "len(entries) > 0", "bookmarked"
    ),
    "a split run loses its version": bug(
        choice_record.ChoiceRecord, "runs", "if s <= start) - 1", "if s < start) - 1", "atomic"
    ),
    "alternatives are those of the token before": bug(
        choice_record.ChoiceRecord, "runs", "self.top_token_ids[start * k : bound * k]",
        "self.top_token_ids[max(0, start - 1) * k : max(0, start - 1) * k + (bound - start) * k]", "atomic",
    ),
    "the seal comes before the last tokens": bug(
        calls.Calls, "_seal", "await record.wait_ended()", "pass", "ordered"
    ),
    "choices are mixed": bug(
        tape.Tape, "_entry", "choice.runs(log.choices[row], first", "choice.runs(0, first", "atomic"
    ),
    "a page's last entry is skipped": bug(
        tape_servicer.TapeServicer,
        "GetTape",
        "next_sequence=position",
        "next_sequence=min(position + 1, tape.end_sequence)",
        "same as GetTape",
    ),
    "a mark of the weights is forgotten": bug(
        convert, "entry_to_proto", "stale_cache=run.weights.stale_cache", "stale_cache=False", "atomic"
    ),
    "a stream skips a token where the weights changed": bug(
        call_reader.CallReader,
        "read_new",
        "choice.runs(index, self._positions[index], end, top_k)",
        "choice.runs(index, self._positions[index] + (end % 7 == 3), end, top_k)",
        "streamed",
    ),
}  # fmt: skip


async def broken(monkeypatch: pytest.MonkeyPatch, enough: Callable[[set[str]], bool]) -> dict[str, str]:
    """What the harness finds on its seeds, until it is `enough`."""
    found: dict[str, str] = {}
    for seed in range(SEEDS):
        monkeypatch.setattr(tape_servicer, "_MAX_POSITIONS_PER_RESPONSE", [7, 65_536][seed % 2])
        for observed in await run_world(seed, SHAPE):
            found = violations(observed) | found
        if enough(set(found)):
            break
    return found


@pytest.mark.parametrize("name", BUGS)
async def test_the_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = BUGS[name]
    monkeypatch.setattr(it.owner, it.name, mutated(getattr(it.owner, it.name), it.old, it.new))
    found = await broken(monkeypatch, lambda found: it.breaks <= found)
    assert it.breaks <= set(found), found


async def test_the_true_store_has_none_on_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await broken(monkeypatch, lambda _: False) == {}
