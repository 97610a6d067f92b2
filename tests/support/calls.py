"""Requests for calls on a manual engine's toy model, and the tapes that they are on."""

from __future__ import annotations

from support.engines import ManualEngine
from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.engine import FinishReason, Sampling
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.tape import Tape, TapeLimits, TapePolicy

TAPE_ID = "main." + "0" * 32


def new_tape(*, limits: TapeLimits | None = None, policy: TapePolicy | None = None, tape_id: str = TAPE_ID) -> Tape:
    return Tape(tape_id, limits or TapeLimits(), policy or TapePolicy())


def prompt(length: int, *, max_tokens: int | None = None, n: int | None = None) -> CallRequest:
    return CallRequest(list(range(length)), sampling=Sampling(max_tokens=max_tokens, n=n))


def finish_reason(record: CallRecord, choice: int = 0) -> FinishReason | None:
    completion = record.choices[choice].completion
    return completion and completion.finish_reason


def max_tokens(engine: ManualEngine) -> int | None:
    return engine.submitted[-1].sampling.max_tokens
