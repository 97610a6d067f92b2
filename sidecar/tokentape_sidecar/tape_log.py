"""The order of events on a tape, as columns. It holds no ids: they are in the calls' records."""

from __future__ import annotations

import enum
from array import array


class EventKind(enum.IntEnum):
    """What happened."""

    CALL_STARTED = 0
    TOKENS_SAMPLED = 1
    CHOICE_FINISHED = 2
    CALL_FAILED = 3
    SEALED = 4


class TapeLog:
    """The columns; row i covers the positions from `starts[i]` to the next row's."""

    def __init__(self) -> None:
        self.starts: array[int] = array("Q")
        self.kinds: array[int] = array("B")
        """Numbers of `EventKind`."""
        self.calls: array[int] = array("I")
        """Indexes of calls on the tape."""
        self.choices: array[int] = array("I")
        self.offsets: array[int] = array("I")
        """Of a run of tokens: the index of its first within the choice."""
        self.end = 0
        """The position after the last event."""

    @property
    def size_bytes(self) -> int:
        """Memory that the columns take."""
        columns = (self.starts, self.kinds, self.calls, self.choices, self.offsets)
        return sum(len(column) * column.itemsize for column in columns)

    def add(self, kind: EventKind, call: int = 0, choice: int = 0, *, offset: int = 0, count: int = 1) -> None:
        """Add an event; tokens of the choice that the last row is about lengthen that row."""
        continues = (
            kind is EventKind.TOKENS_SAMPLED
            and len(self.kinds) > 0
            and (self.kinds[-1], self.calls[-1], self.choices[-1]) == (kind, call, choice)
        )
        if not continues:
            self.starts.append(self.end)
            self.kinds.append(kind)
            self.calls.append(call)
            self.choices.append(choice)
            self.offsets.append(offset)
        self.end += count
