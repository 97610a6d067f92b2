"""What a watcher of a tape is promised, as etcd states it for its watches; a pure function over what was observed.

- **ordered**: within one connection, what happened later comes later;
- **unique**: nothing comes twice, also after resuming;
- **complete**: nothing is missing between what came first and what came last; a watch that ends has all up to the seal;
- **atomic**: what was recorded together comes together: a token with its own log-probability, alternatives, version,
  call and choice, and its text where that was asked for; a call with its whole prompt;
- **resumable**: a position's sequence number is its place on the tape, and a watch begins where it was asked to;
- **bookmarked**: a mark says where the watcher stands, and is given at the end of the tape only; a watch ends with one.

Besides: **agreed**, two watchers have the same bytes at the same positions; **same as GetTape**, a whole watch and the
pages of the sealed tape have one SHA-256; **streamed**, a `Generate` stream has each choice's tokens from the first on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from support.sidecar_client import Generated
from support.watch_positions import Identity, facts_of, identity_of, positions_of
from tokentape.v1.tape_pb2 import GetTapeResponse, TapeEntry, WatchTapeResponse


@dataclass(slots=True)
class Connection:
    """What one `WatchTape` call gave."""

    from_sequence: int
    known_end: int
    """The tape's end when it was called, or an earlier one."""
    include_text: bool = False
    """Whether it asked for text."""
    responses: list[WatchTapeResponse] = field(default_factory=list[WatchTapeResponse])
    kept_until: int | None = None
    """The watcher was lost, and with it what it had from this position on. `None`: it kept all."""
    ended: bool = False
    """Whether the server ended it, without an error."""
    error: str = ""
    """The error that the server ended it with, where nothing called for one."""

    def positions(self) -> Iterator[TapeEntry]:
        """Yield all positions that came."""
        for response in self.responses:
            yield from positions_of(response.entries)

    def kept(self) -> Iterator[TapeEntry]:
        """Yield the positions that the watcher kept."""
        for position in self.positions():
            if self.kept_until is None or position.sequence < self.kept_until:
                yield position


@dataclass(slots=True)
class Watch:
    """One watcher: connections one after the other, each from where the last was left."""

    connections: list[Connection] = field(default_factory=list[Connection])

    def kept(self) -> Iterator[TapeEntry]:
        """Yield what the watcher has in the end."""
        for connection in self.connections:
            yield from connection.kept()

    @property
    def ended(self) -> bool:
        """Whether it came to the tape's end."""
        return bool(self.connections) and self.connections[-1].ended


@dataclass(slots=True)
class Observed:
    """Everything seen of one tape."""

    truth: list[TapeEntry]
    """What must be on it, a position an entry."""
    watches: list[Watch]
    pages: list[GetTapeResponse]
    """All of it after the seal, from the beginning; empty where it was deleted at once."""
    streams: list[Generated]


Problems = Iterable[tuple[str, str]]
"""Guarantee and evidence."""


def violations(observed: Observed) -> dict[str, str]:
    """Return the guarantees that do not hold, each with its first evidence."""
    places = {identity_of(position): place for place, position in enumerate(observed.truth)}
    found: dict[str, str] = {}
    problems = [
        *(problem for watch in observed.watches for problem in _of_watch(watch, observed.truth, places)),
        *_agreed(observed.watches),
        *_same_as_pages(observed),
        *_streamed(observed),
    ]
    for guarantee, evidence in problems:
        found.setdefault(guarantee, evidence)
    return found


def _of_watch(watch: Watch, truth: Sequence[TapeEntry], places: dict[Identity, int]) -> Problems:
    seen: set[int] = set()
    for position in watch.kept():
        place = places.get(identity_of(position))
        if place is None:
            yield "atomic", f"this never happened: {position}"
            continue
        if place in seen:
            yield "unique", f"position {place} came twice"
        seen.add(place)
        if facts_of(position) != facts_of(truth[place]):
            yield "atomic", f"{position} came for {truth[place]}"
        if position.sequence != place:
            yield "resumable", f"position {place} came as {position.sequence}"
    yield from _complete(watch, seen, len(truth))
    for connection in watch.connections:
        yield from _of_connection(connection, places)


def _complete(watch: Watch, seen: set[int], end: int) -> Problems:
    if not watch.connections:
        return
    last = end if watch.ended else max(seen, default=-1) + 1
    missing = set(range(watch.connections[0].from_sequence, last)) - seen
    if missing:
        yield "complete", f"positions {sorted(missing)[:5]} are missing of {last}"


def _of_connection(connection: Connection, places: dict[Identity, int]) -> Problems:
    order = [places.get(identity_of(position), -1) for position in connection.positions()]
    yield from (("ordered", f"{later} came after {earlier}") for earlier, later in pairwise(order) if later < earlier)
    first = next(connection.positions(), None)
    if first is not None and first.sequence != connection.from_sequence:
        yield "resumable", f"asked for {connection.from_sequence}, it began with {first.sequence}"
    for entry in (entry for response in connection.responses for entry in response.entries):
        started, run = entry.call_started, entry.tokens_sampled
        ids = len(started.prompt_token_ids) + len(run.token_ids)
        if len(started.text_pieces) + len(run.text_pieces) != (ids if connection.include_text else 0):
            yield "atomic", f"an entry's text is of other tokens: {entry}"
    if connection.error:
        yield "complete", f"the watch ended with an error: {connection.error}"
    yield from _bookmarked(connection)


def _bookmarked(connection: Connection) -> Problems:
    reached = connection.from_sequence
    for response in connection.responses:
        for position in positions_of(response.entries):
            reached = position.sequence + 1
        mark = response.caught_up_to if response.HasField("caught_up_to") else None
        if mark is None and not response.entries:
            yield "bookmarked", "a response has neither entries nor a mark"
        if mark is not None and mark != reached:
            yield "bookmarked", f"a mark says {mark} at {reached}"
        if mark is not None and mark < connection.known_end:
            yield "bookmarked", f"a mark says {mark} when the tape had {connection.known_end} positions"
    last = connection.responses[-1] if connection.responses else None
    if connection.ended and (last is None or not last.HasField("caught_up_to")):
        yield "bookmarked", "the watch ended without a mark"


def _agreed(watches: Sequence[Watch]) -> Problems:
    bytes_at: dict[int, bytes] = {}
    for watch in watches:
        for position in watch.kept():
            mine = position.SerializeToString(deterministic=True)
            if bytes_at.setdefault(position.sequence, mine) != mine:
                yield "agreed", f"two watchers differ at {position.sequence}"


def _same_as_pages(observed: Observed) -> Problems:
    if not observed.pages:
        return
    paged = digest(positions_of(entry for page in observed.pages for entry in page.entries))
    for watch in observed.watches:
        if watch.ended and watch.connections[0].from_sequence == 0 and digest(watch.kept()) != paged:
            yield "same as GetTape", "a watch of the whole tape has another SHA-256"
    if paged != digest(observed.truth):
        yield "same as GetTape", "the pages have another SHA-256 than what happened"


def digest(positions: Iterable[TapeEntry]) -> str:
    """Return the SHA-256 of positions."""
    hashed = hashlib.sha256()
    for position in positions:
        content = position.SerializeToString(deterministic=True)
        hashed.update(len(content).to_bytes(4, "big") + content)
    return hashed.hexdigest()


def _streamed(observed: Observed) -> Problems:
    sampled: dict[tuple[str, int], list[int]] = {}
    for position in observed.truth:
        token = position.tokens_sampled
        sampled.setdefault((token.call_id, token.choice), []).extend(token.token_ids)
    for stream in observed.streams:
        for choice in {delta.choice for delta in stream.deltas} | set(stream.finished):
            got, there = stream.token_ids(choice), sampled.get((stream.started.call_id, choice), [])
            whole = choice in stream.finished
            if got != (there if whole else there[: len(got)]):
                yield "streamed", f"choice {choice} streamed {got} of {there}"
