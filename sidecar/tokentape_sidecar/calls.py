"""Calls from request to record: validated, bounded by their tape, submitted to the engine, aborted when need be.

Invariants:

1. The engine sees only calls that passed every check, with `max_tokens` clamped to the room that there is.
2. A call on a tape is on it before the engine has it, so that no sampled token can miss its tape.
3. Whoever ends a call early (client, deadline, seal, shutdown) does it by the engine's abort; the record then takes
   what was sampled until there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tokentape_sidecar.engine import Engine, EngineCall, FinishReason, Sampling
from tokentape_sidecar.errors import (
    ContextOverflow,
    EngineStalled,
    InvalidArgument,
    LimitReached,
    NotFound,
    ShuttingDown,
)
from tokentape_sidecar.record import CallRecord, Origin, Parent
from tokentape_sidecar.tape import Tape
from tokentape_sidecar.validation import check_lora, check_sampling, check_token_ids

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0
"""How long an engine may take to end the calls that are aborted at a shutdown."""


@dataclass(frozen=True, slots=True)
class CallReference:
    """A place in an earlier call of the tape: `offset` sampled tokens of its `choice` (`None`: all)."""

    call_id: str
    choice: int = 0
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call as it was asked for; the fields mean what `tokentape.v1.GenerateRequest` says."""

    prompt_token_ids: Sequence[int]
    parent: CallReference | None = None
    sampling: Sampling = field(default_factory=Sampling)
    origin: Origin = field(default_factory=Origin)
    priority: int = 0
    lora_name: str = ""
    cache_salt: str = ""


class Calls:
    """All calls of one engine that have not ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, CallRecord] = {}
        self._aborted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = True
        self._silent_seconds: float | None = None
        self._emitted_by_ended = 0

    @property
    def running_count(self) -> int:
        """Calls that have not ended."""
        return len(self._running)

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
        if self._silent_seconds is not None:
            raise EngineStalled(self._silent_seconds)
        if tape is not None:
            tape.check_open()
        check_lora(request.lora_name, self._engine.model)
        parent = _resolve_parent(request, tape)
        check_token_ids("prompt_token_ids", request.prompt_token_ids, self._engine.model.vocabulary_size)
        record = CallRecord(
            call_id=f"call-{uuid.uuid4().hex}",
            prompt_suffix=request.prompt_token_ids,
            sampling=self._sampling_for(request, parent, tape),
            parent=parent,
            origin=request.origin,
            call_index=len(tape.calls) if tape else 0,
            lora_name=request.lora_name,
            listener=tape,
        )
        if tape is not None:
            tape.add_call(record)
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
        self._silent_seconds = silent_seconds
        for record in list(self._running.values()):
            record.fail(EngineStalled(silent_seconds))
        try:
            yield
        finally:
            self._silent_seconds = None

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
        self._aborted.discard(record.call_id)
        # The end of an aborted call may be our own doing.
        self._emitted_by_ended += record.sampled_token_count + (not aborted)
        # A record can fail by what the engine gave it while the engine itself goes on.
        if record.error is not None and not aborted:
            self._own(self._engine.abort(record.call_id))

    def _sampling_for(self, request: CallRequest, parent: Parent | None, tape: Tape | None) -> Sampling:
        model = self._engine.model
        asked = request.sampling
        if tape is not None:
            asked = asked.overlaid(tape.policy.sampling)
        check_sampling(asked, model)
        sampling = model.default_sampling.overlaid(asked)
        sampling = replace(sampling, n=sampling.n or 1)
        room = _room(request, parent, tape, model.max_context_tokens)
        if tape is not None:
            room = min(room, _share_of_tape(tape, sampling.n or 1))
            if tape.policy.seed is not None:
                sampling = replace(sampling, seed=_mixed_seed(tape.policy.seed, tape.tape_id, len(tape.calls)))
        max_tokens = min(room, sampling.max_tokens or room)
        # Where the room is less than what must be sampled, the call ends at its length; an engine would refuse it.
        min_tokens = None if sampling.min_tokens is None else min(sampling.min_tokens, max_tokens)
        return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _resolve_parent(request: CallRequest, tape: Tape | None) -> Parent | None:
    reference = request.parent
    if reference is None:
        return None
    if tape is None:
        raise InvalidArgument("parent", "needs a tape_id: only calls on a tape can be continued")
    record = tape.call(reference.call_id)
    if record is None:
        raise NotFound(f"parent.call_id: no call {reference.call_id!r} on this tape")
    if record.lora_name != request.lora_name:
        # Its tokens would be those of one sample, and no single policy has sampled them.
        raise InvalidArgument(
            "lora_name", f"the parent was sampled with {record.lora_name!r}, not {request.lora_name!r}"
        )
    if reference.choice >= len(record.choices):
        raise InvalidArgument(
            "parent.choice", f"the call has {len(record.choices)} choices, not a choice {reference.choice}"
        )
    sampled = len(record.choices[reference.choice].token_ids)
    offset = sampled if reference.offset is None else reference.offset
    if offset > sampled:
        raise InvalidArgument("parent.offset", f"the choice has {sampled} sampled tokens, not {offset}")
    return Parent(record, reference.choice, offset)


def _room(request: CallRequest, parent: Parent | None, tape: Tape | None, max_context_tokens: int) -> int:
    prompt = len(request.prompt_token_ids) + (parent.record.prompt_token_count + parent.offset if parent else 0)
    if prompt == 0:
        raise InvalidArgument("prompt_token_ids", "must not be empty")
    if tape is not None and tape.limits.max_context_tokens is not None:
        max_context_tokens = min(max_context_tokens, tape.limits.max_context_tokens)
    if prompt >= max_context_tokens:
        raise ContextOverflow(prompt, max_context_tokens)
    return max_context_tokens - prompt


def _share_of_tape(tape: Tape, n: int) -> int:
    left = tape.tokens_left()
    if left is None:
        return 2**32 - 1
    if left < n:
        raise LimitReached(
            f"tape_id: the tape has {left} of its {tape.limits.max_sampled_tokens} sampled tokens left "
            "(max_sampled_tokens)"
        )
    return left // n


def _mixed_seed(policy_seed: int, tape_id: str, call_index: int) -> int:
    digest = hashlib.sha256(f"{policy_seed}/{tape_id}/{call_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
