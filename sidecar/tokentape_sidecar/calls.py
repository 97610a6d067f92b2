"""Calls from request to record: validated, bounded by their tape, submitted to the engine, aborted when need be.

Invariants:

1. The engine sees only calls that passed every check, with `max_tokens` clamped to the room that there is.
2. A call on a tape is on it before the engine has it, so that no sampled token can miss its tape.
3. Whoever ends a call early (client, deadline, seal, shutdown) does it by the engine's abort; the record then takes
   what was sampled until there.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Generator
from contextlib import contextmanager

from tokentape_sidecar.call_request import CallRequest, check
from tokentape_sidecar.engine import Engine, EngineCall, FinishReason
from tokentape_sidecar.errors import EngineBusy, EngineStalled, ShuttingDown, WeightsBroken
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.statistics import CallStatistics
from tokentape_sidecar.tape import Tape

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0
"""How long an engine may take to end the calls that are aborted at a shutdown."""


class Calls:
    """All calls of one engine that have not ended."""

    def __init__(self, engine: Engine, limits: Limits = DEFAULT_LIMITS) -> None:
        self._engine = engine
        self._limits = limits
        self.statistics = CallStatistics()
        self._running: dict[str, CallRecord] = {}
        self._aborted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = True
        self.silent_seconds: float | None = None
        """In a stall: how long the engine had given nothing when that was noticed."""
        self._weights_broken = False
        self._emitted_by_ended = 0

    @property
    def accepting(self) -> bool:
        """Whether new calls are taken, as far as that is this process's to say: not while it drains."""
        return self._accepting

    @property
    def running_count(self) -> int:
        """Calls that have not ended."""
        return len(self._running)

    @property
    def sampled_token_count(self) -> int:
        """Tokens that were sampled for all calls, ended or not."""
        return self.statistics.sampled_tokens + sum(record.sampled_token_count for record in self._running.values())

    @property
    def emitted_count(self) -> int:
        """A number that grows whenever the engine samples or ends a call by itself; tokens of all calls, mostly."""
        return self._emitted_by_ended + sum(record.sampled_token_count for record in self._running.values())

    async def start(self, request: CallRequest, tape: Tape | None) -> CallRecord:
        """Check a call, put it on its tape and give it to the engine.

        Raises the errors of `errors.py` that `GenerationService.Generate` lists; the engine's own refusal too, which
        the tape then records as a failed call.
        """
        if not self._accepting:
            raise ShuttingDown("the sidecar is shutting down and takes no more calls")
        if self.silent_seconds is not None:
            raise EngineStalled(self.silent_seconds)
        if self._weights_broken:
            raise WeightsBroken
        if len(self._running) >= self._limits.max_running_calls:
            raise EngineBusy(f"the sidecar runs as many calls as it may ({self._limits.max_running_calls})")
        if tape is not None:
            tape.check_open()
            tape.check_size(self._limits.max_tape_bytes)
        parent, sampling = check(request, tape, self._engine.model, self._limits)
        record = CallRecord(
            call_id=f"call-{uuid.uuid4().hex}",
            prompt_suffix=request.prompt_token_ids,
            sampling=sampling,
            parent=parent,
            origin=request.origin,
            call_index=len(tape.calls) if tape else 0,
            lora_name=request.lora_name,
            max_weight_changes=tape.limits.max_weight_changes if tape else None,
            listener=tape,
        )
        if tape is not None:
            tape.add_call(record)
        self.statistics.call_started(record, on_tape=tape is not None)
        logger.debug("call %s starts: %d prompt tokens", record.call_id, record.prompt_token_count)
        await self._submit(record, request)
        return record

    async def abort(self, call_id: str) -> None:
        """End a running call at the engine; an unknown or finished one is left alone."""
        if call_id in self._running:
            self._aborted.add(call_id)
            await self._engine.abort(call_id)

    def abandon(self, record: CallRecord) -> None:
        """End a call whose reader has gone, without waiting for it."""
        if not record.ended:
            self._own(self.abort(record.call_id))

    async def seal(self, tape: Tape) -> None:
        """Take no more calls on `tape`, abort its running ones, and seal it when they have ended.

        That goes on even if the one who waits for it is cancelled: a tape does not stay half sealed.
        """
        tape.begin_sealing()
        await asyncio.shield(self._own(self._seal(tape)))

    async def _seal(self, tape: Tape) -> None:
        running = tape.running_calls
        for record in running:
            await self.abort(record.call_id)
        for record in running:
            await record.wait_ended()
        tape.seal()

    @contextmanager
    def stalled(self, silent_seconds: float) -> Generator[None]:
        """Fail every running call, aborting it at the engine, and take no new one within; all with `EngineStalled`."""
        self.silent_seconds = silent_seconds
        self.statistics.stalls += 1
        for record in list(self._running.values()):
            record.fail(EngineStalled(silent_seconds))
        try:
            yield
        finally:
            self.silent_seconds = None

    def note_weight_change(self) -> None:
        """Note that the weights change: calls on tapes that allow no further change fail, with `StaleWeights`."""
        for record in list(self._running.values()):
            record.note_weight_change()

    def break_weights(self) -> None:
        """Fail every running call and take no new one until `mend_weights`; all with `WeightsBroken`."""
        self._weights_broken = True
        for record in list(self._running.values()):
            record.fail(WeightsBroken())

    def mend_weights(self) -> None:
        """Take calls again."""
        self._weights_broken = False

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new calls, let running ones finish within the grace period, then abort the rest.

        Calls that the engine does not end within `ABORT_SECONDS` fail.
        """
        self._accepting = False
        try:
            async with asyncio.timeout(grace_seconds):
                await self._wait_all_ended()
        except TimeoutError:
            logger.warning("aborting %d calls that outlived the grace period", len(self._running))
            await self._abort_all()

    async def _abort_all(self) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                for call_id in list(self._running):
                    await self.abort(call_id)
                await self._wait_all_ended()
        except TimeoutError:
            logger.error("the engine has not ended %d calls that were aborted", len(self._running))
            for record in list(self._running.values()):
                record.fail(ShuttingDown("the sidecar is shutting down, and the engine did not end this call"))

    async def close(self) -> None:
        """Cancel what this object still does in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("ending a call or a tape failed", exc_info=error)

    async def _wait_all_ended(self) -> None:
        for record in list(self._running.values()):
            await record.wait_ended()

    async def _submit(self, record: CallRecord, request: CallRequest) -> None:
        call_id = record.call_id
        self._running[call_id] = record
        record.on_end(lambda: self._forget(record))
        try:
            await self._engine.submit(
                EngineCall(
                    call_id=call_id,
                    prompt_token_ids=record.prompt_token_ids(),
                    sampling=record.sampling,
                    priority=request.priority,
                    lora_name=request.lora_name,
                    cache_salt=request.cache_salt,
                    trace_headers=request.trace_headers,
                ),
                record,
            )
        except asyncio.CancelledError:
            # The client left: nothing has failed.
            self._aborted.add(call_id)
            self._own(self._engine.abort(call_id))
            for choice in range(len(record.choices)):
                record.finish(choice, FinishReason.ABORT)
            raise
        except Exception as error:
            record.fail(error)
            raise
        # An abort or a failure that came while the engine was still taking the call found nothing to end there.
        if record.error is not None or (call_id in self._aborted and not record.ended):
            await self._engine.abort(call_id)

    def _forget(self, record: CallRecord) -> None:
        aborted = record.call_id in self._aborted
        self._running.pop(record.call_id, None)
        outcome, tokens = self.statistics.call_ended(record), record.sampled_token_count
        logger.debug("call %s has ended: %s, %d tokens sampled", record.call_id, outcome, tokens)
        self._aborted.discard(record.call_id)
        # The end of an aborted call may be our own doing.
        self._emitted_by_ended += record.sampled_token_count + (not aborted)
        # A record can fail by what the engine gave it while the engine itself goes on.
        if record.error is not None and not aborted:
            self._own(self._engine.abort(record.call_id))
