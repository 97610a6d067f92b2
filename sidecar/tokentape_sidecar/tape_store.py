"""The tapes that a sidecar holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Model
from tokentape_sidecar.errors import AlreadyExists, InvalidArgument, LimitReached, NotFound
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.tape import Tape, TapeLimits, TapePolicy, sidecar_name_of
from tokentape_sidecar.validation import check_sampling

DEFAULT_TIME_TO_LIVE_SECONDS = 3600.0
"""How long an idle tape is kept where its owner did not say."""

SWEEP_SECONDS = 5.0
"""How often idle tapes are looked for."""


class TapeStore:
    """Opens, finds, seals and forgets tapes. Only tapes that are named after this sidecar are taken."""

    def __init__(self, sidecar_name: str, model: Model, calls: Calls, limits: Limits = DEFAULT_LIMITS) -> None:
        self._sidecar_name = sidecar_name
        self._model = model
        self._calls = calls
        self._limits = limits
        self._tapes: dict[str, Tape] = {}
        self.opened_count = 0
        """Tapes that were opened so far."""

    def open(self, tape_id: str, limits: TapeLimits, policy: TapePolicy) -> Tape:
        """Start a tape. `InvalidArgument`, `AlreadyExists` or `LimitReached` where that cannot be."""
        self._check_name(tape_id)
        if limits.time_to_live_seconds is not None and limits.time_to_live_seconds <= 0:
            raise InvalidArgument("limits.time_to_live", "must be above 0 seconds")
        for name, value in (
            ("max_context_tokens", limits.max_context_tokens),
            ("max_sampled_tokens", limits.max_sampled_tokens),
            ("max_calls", limits.max_calls),
        ):
            if value == 0:
                raise InvalidArgument(f"limits.{name}", "must be at least 1")
        check_sampling(policy.sampling, self._model, field="sampling_policy", limits=self._limits)
        if tape_id in self._tapes:
            raise AlreadyExists("tape_id: there is a tape of this id already")
        most = self._limits.max_tapes
        if len(self._tapes) >= most:
            raise LimitReached(f"tape_id: the sidecar holds {most} tapes, as many as it may (max_tapes)")
        tape = self._tapes[tape_id] = Tape(tape_id, limits, policy)
        self.opened_count += 1
        return tape

    def held(self) -> list[Tape]:
        """Return the tapes that are held, oldest first."""
        return list(self._tapes.values())

    def writable(self, tape_id: str) -> Tape:
        """Return the tape for a call on it; `NotFound` where there is none."""
        self._check_name(tape_id)
        tape = self._tapes.get(tape_id)
        if tape is None:
            raise NotFound("tape_id: there is no tape of this id")
        return tape

    def readable(self, tape_id: str, reader_token: str) -> Tape:
        """Return the tape for its reader; `NotFound`, or `PermissionDenied` where the token is not the tape's."""
        tape = self.writable(tape_id)
        tape.check_reader(reader_token)
        tape.touch()
        return tape

    @contextmanager
    def watched(self, tape: Tape) -> Generator[None]:
        """Count one more watcher of `tape` within. Raises `LimitReached` where it has as many as it may."""
        most = self._limits.max_watchers_per_tape
        if tape.watcher_count >= most:
            raise LimitReached(f"tape_id: the tape has {most} watchers, as many as it may (max_watchers_per_tape)")
        tape.watcher_count += 1
        try:
            yield
        finally:
            tape.watcher_count -= 1
            tape.touch()

    async def delete(self, tape: Tape) -> None:
        """Seal a tape if need be, which lets its watchers end, and forget it."""
        await self._calls.seal(tape)
        self._tapes.pop(tape.tape_id, None)

    async def sweep_forever(self) -> None:
        """Delete tapes that nobody has used for their time to live; runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            for tape in list(self._tapes.values()):
                time_to_live = tape.limits.time_to_live_seconds or DEFAULT_TIME_TO_LIVE_SECONDS
                idle = not tape.running_calls and tape.watcher_count == 0
                if idle and now - tape.last_used > time_to_live:
                    await self.delete(tape)

    def _check_name(self, tape_id: str) -> None:
        name = sidecar_name_of(tape_id)
        if name != self._sidecar_name:
            raise InvalidArgument("tape_id", f"names the sidecar {name!r}; this one is {self._sidecar_name!r}")
