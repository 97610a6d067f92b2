"""A cursor on a call's record, for whoever streams the call."""

from __future__ import annotations

from tokentape_sidecar.choice_record import Completion, TokenRun
from tokentape_sidecar.record import CallRecord


class CallReader:
    """A cursor on a record: what is new since the last read, each token once."""

    MAX_VALUES = 262_144
    """Log-probabilities of one read of a choice, at most; in a message they pass gRPC's default limit of 4 MiB."""

    def __init__(self, record: CallRecord) -> None:
        self._record = record
        self._positions = [0] * len(record.choices)
        self._finished = [False] * len(record.choices)

    def read_new(self) -> list[TokenRun | Completion]:
        """Return what was added since the last read; a choice's completion after its last token.

        Of a long backlog it is a part, and the next read goes on; nothing returned means that there is nothing new.
        """
        events: list[TokenRun | Completion] = []
        top_k = self._record.sampling.top_logprobs or 0
        most = max(1, self.MAX_VALUES // (1 + top_k))
        for index, choice in enumerate(self._record.choices):
            end, completion = min(len(choice.token_ids), self._positions[index] + most), choice.completion
            if end > self._positions[index]:
                events += choice.runs(index, self._positions[index], end, top_k)
                self._positions[index] = end
            if completion is not None and not self._finished[index] and end == len(choice.token_ids):
                self._finished[index] = True
                events.append(completion)
        return events

    @property
    def at_end(self) -> bool:
        """Whether the record has ended and all of it was read."""
        return self._record.ended and all(
            position == len(choice.token_ids) and finished == (choice.completion is not None)
            for position, choice, finished in zip(self._positions, self._record.choices, self._finished, strict=True)
        )
