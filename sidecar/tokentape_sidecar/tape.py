"""A tape: everything that happened in one rollout, in the order in which it happened.

A tape holds its calls' records and a log of what they took, one entry per event: a call's start, a run of sampled
tokens (consecutive tokens of one choice share an entry, whatever steps they came in), a choice's end, a failure, the
seal. Positions are numbered from 0 without gaps; a run takes one position per token, so a reader can start at any
token. The log holds no ids: they are in the records.

Invariants:

1. Two readers that read the same positions get the same tokens in the same order, however they are grouped.
2. A call's start comes before its tokens, a choice's end after all of its tokens; the seal is last.
3. After `begin_sealing` no call is added, ever.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokentape_sidecar.broadcast import Broadcast
from tokentape_sidecar.choice_record import Completion, TokenRun
from tokentape_sidecar.engine import Sampling
from tokentape_sidecar.errors import InvalidArgument, LimitReached, PermissionDenied, SequenceOutOfRange, TapeSealed
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.tape_log import EventKind, TapeLog

SCHEMA_VERSION = 1
"""The version of the entries that a tape is made of."""

SIDECAR_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""What a sidecar may be called, as a regular expression."""

_TAPE_ID = re.compile(rf"(?P<sidecar>{SIDECAR_NAME})\.[0-9a-f]{{32}}")


def sidecar_name_of(tape_id: str) -> str:
    """Return the sidecar's name in a tape id; `InvalidArgument` where it is not `<sidecar name>.<32 hex digits>`."""
    match = _TAPE_ID.fullmatch(tape_id)
    if match is None:
        raise InvalidArgument("tape_id", "must be <sidecar name>.<32 lower-case hex digits>")
    return match["sidecar"]


@dataclass(frozen=True, slots=True)
class TapeLimits:
    """What a tape may take; `None` does not bind. `tokentape.v1.TapeLimits` has the units."""

    max_context_tokens: int | None = None
    max_sampled_tokens: int | None = None
    max_calls: int | None = None
    time_to_live_seconds: float | None = None
    max_weight_changes: int | None = None


@dataclass(frozen=True, slots=True)
class TapePolicy:
    """What a tape's owner set for all calls on it: sampling fields that override, and a seed to mix in."""

    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    keep_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call was made."""

    sequence: int
    record: CallRecord


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """Tokens were sampled; they take the positions from `sequence` on, one each."""

    sequence: int
    record: CallRecord
    run: TokenRun


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice got its last token."""

    sequence: int
    record: CallRecord
    completion: Completion


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call failed, with `record.error`."""

    sequence: int
    record: CallRecord


@dataclass(frozen=True, slots=True)
class Sealed:
    """The tape is complete."""

    sequence: int
    call_count: int
    sampled_token_count: int


Entry = CallStarted | TokensSampled | ChoiceFinished | CallFailed | Sealed


class Tape:
    """The record of one rollout. It is the listener of its calls' records."""

    def __init__(self, tape_id: str, limits: TapeLimits, policy: TapePolicy) -> None:
        """`tape_id` was checked by the store."""
        self.tape_id = tape_id
        self.limits = limits
        self.policy = policy
        self.reader_token = secrets.token_urlsafe(32)
        self.calls: list[CallRecord] = []
        self.sampled_token_count = 0
        self.sealing = False
        self.sealed = False
        self.watcher_count = 0
        self.last_used = time.monotonic()
        self._by_id: dict[str, CallRecord] = {}
        self._settled_calls = 0
        self._settled_bytes = 0
        self._log = TapeLog()
        self._changed = Broadcast()

    @property
    def end_sequence(self) -> int:
        """The position after the last event."""
        return self._log.end

    @property
    def size_bytes(self) -> int:
        """Memory that the tape takes: its log, and the columns of its calls."""
        # The first calls that have ended are counted once: this is asked for at every call.
        while self._settled_calls < len(self.calls) and self.calls[self._settled_calls].ended:
            self._settled_bytes += self.calls[self._settled_calls].size_bytes
            self._settled_calls += 1
        growing = sum(call.size_bytes for call in self.calls[self._settled_calls :])
        return self._log.size_bytes + self._settled_bytes + growing

    @property
    def running_calls(self) -> list[CallRecord]:
        """Calls that have not ended, in order."""
        return [call for call in self.calls if not call.ended]

    def touch(self) -> None:
        """Note that the tape is in use: its time to live begins anew."""
        self.last_used = time.monotonic()

    def check_reader(self, reader_token: str) -> None:
        """Raise `PermissionDenied` unless this is the tape's reader token; in constant time."""
        if not hmac.compare_digest(reader_token.encode(), self.reader_token.encode()):
            raise PermissionDenied("reader_token: this is not the tape's reader token")

    def check_open(self) -> None:
        """Raise `TapeSealed` or `LimitReached` where no further call may be made."""
        if self.sealing:
            raise TapeSealed("tape_id: the tape is sealed and takes no more calls")
        if self.limits.max_calls is not None and len(self.calls) >= self.limits.max_calls:
            raise LimitReached(f"tape_id: the tape has its {self.limits.max_calls} calls (max_calls)")

    def check_size(self, max_bytes: int) -> None:
        """Raise `LimitReached` where the tape takes `max_bytes` and more. Calls that run may still grow beyond."""
        size = self.size_bytes
        if size >= max_bytes:
            raise LimitReached(f"tape_id: the tape takes {size} bytes, and may take {max_bytes} (max_tape_bytes)")

    def tokens_left(self) -> int | None:
        """Tokens that a further call may sample, given what running calls still may; `None` where unlimited."""
        limit = self.limits.max_sampled_tokens
        if limit is None:
            return None
        promised = sum(
            (call.sampling.max_tokens or 0) - len(choice.token_ids)
            for call in self.running_calls
            for choice in call.choices
            if choice.completion is None
        )
        return limit - self.sampled_token_count - promised

    def add_call(self, record: CallRecord) -> None:
        """Put a new call on the tape; its `call_index` is the tape's next."""
        self.calls.append(record)
        self._by_id[record.call_id] = record
        self._log.add(EventKind.CALL_STARTED, record.call_index)
        self.touch()
        self._changed.notify()

    def call(self, call_id: str) -> CallRecord | None:
        """Return the call of this name, if it is on this tape."""
        return self._by_id.get(call_id)

    def find_calls(self, anchors: Iterable[str], exact_token_ids: Sequence[int]) -> list[CallRecord]:
        """Return, in order, the calls with one of `anchors` or whose prompt and a completion are `exact_token_ids`."""
        wanted, exact = set(anchors) - {""}, array("I", exact_token_ids)
        return [call for call in self.calls if call.origin.anchor in wanted or (exact and call.spells(exact))]

    def tokens_sampled(self, record: CallRecord, choice: int, count: int) -> None:
        """Note new tokens (see `record.RecordListener`)."""
        offset = len(record.choices[choice].token_ids) - count
        self._log.add(EventKind.TOKENS_SAMPLED, record.call_index, choice, offset=offset, count=count)
        self.sampled_token_count += count
        self._changed.notify()

    def choice_finished(self, record: CallRecord, choice: int) -> None:
        """Note a choice's end (see `record.RecordListener`)."""
        self._log.add(EventKind.CHOICE_FINISHED, record.call_index, choice)
        self.touch()
        self._changed.notify()

    def call_failed(self, record: CallRecord) -> None:
        """Note a failure (see `record.RecordListener`)."""
        self._log.add(EventKind.CALL_FAILED, record.call_index)
        self.touch()
        self._changed.notify()

    def begin_sealing(self) -> None:
        """Take no more calls from now on."""
        self.sealing = True

    def seal(self) -> None:
        """Add the seal; all calls have ended."""
        if not self.sealed:
            self._log.add(EventKind.SEALED)
            self.sealed = True
            self._changed.notify()

    async def wait_changed(self) -> None:
        """Return at the next event."""
        await self._changed.wait()

    def read(self, from_sequence: int, max_positions: int) -> tuple[list[Entry], int]:
        """Return the entries from `from_sequence` on and the position after them.

        They cover `max_positions` at most; prompt tokens and top log-probabilities count as positions here, so that
        what is returned is bounded, but for a single longer prompt.
        """
        if from_sequence > self.end_sequence:
            raise SequenceOutOfRange(f"from_sequence: {from_sequence} is beyond the tape's end, {self.end_sequence}")
        entries: list[Entry] = []
        position, added = from_sequence, 0
        while position < self.end_sequence and (room := max_positions - added - (position - from_sequence)) > 0:
            entry = self._entry(position, room)
            if isinstance(entry, CallStarted):
                added += len(entry.record.prompt_suffix)
                if entries and added + position - from_sequence > max_positions:
                    break
            elif isinstance(entry, TokensSampled) and entry.run.top_logprobs is not None:
                added += len(entry.run.top_logprobs.token_ids)
            entries.append(entry)
            position += len(entry.run.token_ids) if isinstance(entry, TokensSampled) else 1
        return entries, position

    def _entry(self, position: int, max_positions: int) -> Entry:
        """Return what is at `position`; of a run of tokens, as many as share its entry and have room, one at least."""
        log = self._log
        row = bisect_right(log.starts, position) - 1
        kind = EventKind(log.kinds[row])
        if kind is EventKind.SEALED:
            return Sealed(position, len(self.calls), self.sampled_token_count)
        record = self.calls[log.calls[row]]
        if kind is EventKind.CALL_STARTED:
            return CallStarted(position, record)
        if kind is EventKind.CALL_FAILED:
            return CallFailed(position, record)
        choice = record.choices[log.choices[row]]
        if kind is EventKind.CHOICE_FINISHED:
            assert choice.completion is not None
            return ChoiceFinished(position, record, choice.completion)
        row_end = log.starts[row + 1] if row + 1 < len(log.starts) else log.end
        first = log.offsets[row] + position - log.starts[row]
        k = record.sampling.top_logprobs or 0
        end = first + min(row_end - position, max(1, max_positions // (1 + k)))
        return TokensSampled(position, record, next(choice.runs(log.choices[row], first, end, k)))
