"""A call's record, and what is in it."""

from __future__ import annotations

from collections.abc import Sequence

from tokentape_sidecar.choice_record import Completion, TokenRun
from tokentape_sidecar.engine import Sampling
from tokentape_sidecar.record import CallRecord


def record(*, n: int = 1, top_logprobs: int | None = None, prompt_logprobs: int | None = None) -> CallRecord:
    return CallRecord(
        call_id="call-1",
        prompt_suffix=[1, 2, 3],
        sampling=Sampling(n=n, top_logprobs=top_logprobs, prompt_logprobs=prompt_logprobs),
    )


def ids_of(call: CallRecord, choice: int = 0) -> list[int]:
    return list(call.choices[choice].token_ids)


def runs_of(events: Sequence[TokenRun | Completion]) -> list[TokenRun]:
    return [event for event in events if isinstance(event, TokenRun)]
