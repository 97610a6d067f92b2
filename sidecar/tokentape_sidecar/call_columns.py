"""What is new of many calls, as the columns of a few messages.

Invariants:

1. Read in the order of the messages, and within one in the order of its fields, each call's events are those that
   `Generate` would have sent: accepted, tokens, choices that ended, the end.
2. All runs of a message have one version of the weights and one k, as its single fields for these say.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

import grpc

from tokentape.call_status import Status
from tokentape.v1.generation_pb2 import GenerateManyResponse
from tokentape.v1.types_pb2 import TopLogprobs
from tokentape_sidecar import convert
from tokentape_sidecar.call_reader import CallReader
from tokentape_sidecar.choice_record import ChoiceRecord, TokenRun
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.rpc_errors import status_of

MAX_EVENTS = 512
"""From how many starts and ends on nothing more is put into a message: beside its tokens they are within 4 MiB."""


class Cursor:
    """How far a call has been read."""

    __slots__ = ("_open_choices", "has_ended", "has_started", "key", "positions", "record", "top_k")

    def __init__(self, key: int, record: CallRecord) -> None:
        """At the beginning of `record`, which the reader calls `key`."""
        self.key = key
        self.record = record
        self.top_k: int = record.sampling.top_logprobs or 0
        self.positions = [0] * len(record.choices)
        """Of each choice."""
        self.has_started = False
        self.has_ended = False
        """Whether nothing more is to be read: the end was, or nobody wants it."""
        self._open_choices = set(range(len(record.choices)))

    def close(self, index: int) -> bool:
        """Read the end of a choice; whether it is there, all before it was read, and it was not."""
        completion = self.record.choices[index].completion
        if completion is None or index not in self._open_choices or self.positions[index] < completion.token_count:
            return False
        self._open_choices.discard(index)
        return True

    @property
    def at_end(self) -> bool:
        """Whether the record has ended and all of it was read."""
        return self.record.ended and all(
            position == len(choice.token_ids) and (choice.completion is None or index not in self._open_choices)
            for index, (position, choice) in enumerate(zip(self.positions, self.record.choices, strict=True))
        )


_top_k = operator.attrgetter("top_k")


def new_of(cursors: Iterable[Cursor]) -> Iterator[GenerateManyResponse]:
    """Yield what is new at `cursors`, and move them. Each message is within gRPC's default limit of 4 MiB.

    Between two messages the records may grow, and what has come by then may be left for the next time.
    """
    columns = _Columns()
    # Calls of one k after the other: each change of it takes another message.
    for cursor in sorted(cursors, key=_top_k):
        record = cursor.record
        if cursor.has_ended:
            continue
        if not cursor.has_started:
            if not record.started:
                continue
            cursor.has_started = True
            columns.add_started(cursor)
        for index, choice in enumerate(record.choices):
            columns.add_new(cursor, index, choice)
        if record.ended and cursor.at_end:
            cursor.has_ended = True
            columns.add_end(cursor)
        columns.end_if_many()
        if columns.full:
            yield from columns.take_full()
    columns.end()
    yield from columns.take_full()


def outcome_of(record: CallRecord) -> Status:
    """Return the status of a record that has ended."""
    return (grpc.StatusCode.OK, "") if record.error is None else status_of(record.error)


def end_of(key: int, status: grpc.StatusCode, message: str) -> GenerateManyResponse.CallEnded:
    """Return what says that the call `key` ended with `status`."""
    code: int = status.value[0]
    return GenerateManyResponse.CallEnded(key=key, code=code, message=message)


class _Columns:
    """Messages in the making: those that are `full`, and one more."""

    def __init__(self) -> None:
        self.full: list[GenerateManyResponse] = []
        self._begin()

    def _begin(self) -> None:
        self._started: list[GenerateManyResponse.CallStarted] = []
        self._keys: list[int] = []
        self._choices: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._version: str = ""
        self._k: int = 0
        self._top_token_ids: list[int] = []
        self._top_logprobs: list[float] = []
        self._finished: list[GenerateManyResponse.ChoiceFinished] = []
        self._ended: list[GenerateManyResponse.CallEnded] = []

    def take_full(self) -> list[GenerateManyResponse]:
        """Return the messages that are full; they are no longer here."""
        full, self.full = self.full, []
        return full

    def add_started(self, cursor: Cursor) -> None:
        """Add that a call was accepted."""
        started = convert.started_to_proto(cursor.record).started
        has_prompt = cursor.record.prompt_logprobs is not None
        if has_prompt:
            # In a message of its own: several long prompts together could be more than a client takes.
            self.end()
        self._started.append(GenerateManyResponse.CallStarted(key=cursor.key, started=started))
        if has_prompt:
            self.end()

    def add_new(self, cursor: Cursor, index: int, choice: ChoiceRecord) -> None:
        """Add what is new of a choice."""
        k, start = cursor.top_k, cursor.positions[index]
        if (
            k == self._k == 0
            and len(choice.token_ids) == start + 1
            and choice.weights[-1].version == self._version
            and len(self._token_ids) < CallReader.MAX_VALUES
        ):
            # One more token of the same weights is almost all that steps bring, so here is no slice and no other call.
            self._keys.append(cursor.key)
            self._choices.append(index)
            self._counts.append(1)
            self._token_ids.append(choice.token_ids[start])
            self._logprobs.append(choice.logprobs[start])
            cursor.positions[index] = start + 1
        elif len(choice.token_ids) > start:
            self._add_all(cursor, index, choice)
        if choice.completion is not None and cursor.close(index):
            completion = convert.completion_to_proto(choice.completion)
            self._finished.append(GenerateManyResponse.ChoiceFinished(key=cursor.key, completion=completion))

    def _add_all(self, cursor: Cursor, index: int, choice: ChoiceRecord) -> None:
        k, start = cursor.top_k, cursor.positions[index]
        while (left := len(choice.token_ids) - start) > 0:
            end = start + min(left, CallReader.MAX_VALUES // (1 + k) or 1)
            if k or choice.weight_starts[-1] > start:
                for run in choice.runs(index, start, end, k):
                    self._add_run(cursor, run)
            else:
                self._make_room(choice.weights[-1].version, 0, end - start)
                self._put(cursor.key, index, choice.token_ids[start:end], choice.logprobs[start:end])
            cursor.positions[index] = start = end

    def add_end(self, cursor: Cursor) -> None:
        """Add that a call has ended."""
        self._ended.append(end_of(cursor.key, *outcome_of(cursor.record)))

    def end(self) -> None:
        """Take the message in the making for full, if there is anything in it."""
        if self._keys or self._started or self._finished or self._ended:
            self.full.append(self._message())
            self._begin()

    def end_if_many(self) -> None:
        """Take the message in the making for full where many calls or choices began or ended in it."""
        if len(self._started) + len(self._finished) + len(self._ended) >= MAX_EVENTS:
            self.end()

    def _add_run(self, cursor: Cursor, run: TokenRun) -> None:
        self._make_room(run.weights.version, cursor.top_k, len(run.token_ids))
        self._put(cursor.key, run.choice, run.token_ids, run.logprobs)
        if run.top_logprobs is not None:
            self._top_token_ids.extend(run.top_logprobs.token_ids)
            self._top_logprobs.extend(run.top_logprobs.logprobs)

    def _make_room(self, version: str, k: int, count: int) -> None:
        """Begin another message if `count` more tokens cannot go into this one."""
        fits = version == self._version and k == self._k
        if self._keys and (not fits or (len(self._token_ids) + count) * (1 + k) > CallReader.MAX_VALUES):
            self.end()
        self._version, self._k = version, k

    def _put(self, key: int, index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._keys.append(key)
        self._choices.append(index)
        self._counts.append(len(token_ids))
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)

    def _message(self) -> GenerateManyResponse:
        return GenerateManyResponse(
            started=self._started,
            keys=self._keys,
            choices=self._choices if any(self._choices) else None,
            token_counts=self._counts if len(self._token_ids) > len(self._keys) else None,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            weight_version=self._version,
            top_logprobs=TopLogprobs(k=self._k, token_ids=self._top_token_ids, logprobs=self._top_logprobs)
            if self._k
            else None,
            finished=self._finished,
            ended=self._ended,
        )
