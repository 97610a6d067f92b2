"""The sidecars of a run, as if they were one: each tape goes to the one that serves and has the fewest rollouts.

A rollout that is to begin while none of them serves waits; so does one whose sidecar the bridge does not reach yet.
Thus a restart costs the rollouts that it hits an attempt, and the others nothing. `lost` bounds the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from typing import TypeAlias

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.cli.bridge_gate import BridgeGate
from tokentape_executor.cli.sidecar import Health, Sidecar
from tokentape_executor.errors import SidecarUnavailable
from tokentape_executor.reader_tokens import ReaderTokenFile
from tokentape_executor.tape_client import NO_OPTIONS, OpenedTape, TapeClient, TapeOptions
from tokentape_executor.tape_file import StoredTape

_RETRY_SECONDS = 0.2

Recorded: TypeAlias = dict[str, list[tape_pb2.TapeEntry]]
"""Tapes' entries, by tape id."""

recorded: ContextVar[Recorded | None] = ContextVar("recorded", default=None)
"""Where tapes that are watched in this context (a task's, and its subtasks') leave their entries; `None`: nowhere."""


class PooledTapes(TapeClient):
    """The tapes of several sidecars of different names."""

    def __init__(
        self,
        sidecars: Sequence[Sidecar],
        bridge: BridgeGate,
        sampled: Callable[[int], object],
        reader_tokens: ReaderTokenFile | None = None,
    ) -> None:
        """`sidecars`: one at least. `sampled` is called with the number of tokens that were just sampled on a tape.

        `reader_tokens` gets a line for each tape that is opened.
        """
        super().__init__(sidecars[0].channel, sidecars[0].name)
        self.sidecars = {sidecar.name: sidecar for sidecar in sidecars}
        self._bridge = bridge
        self._sampled = sampled
        self._reader_tokens = reader_tokens
        self._some_serve = asyncio.Event()
        self._none_serves = asyncio.Event()
        self._some_serve.set()

    async def follow(self) -> None:
        """Follow the health of all of them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for sidecar in self.sidecars.values():
                tasks.create_task(sidecar.follow(self._update))

    async def lost(self, patience_seconds: float) -> None:
        """Return when none has served for `patience_seconds`."""
        while True:
            await self._none_serves.wait()
            try:
                async with asyncio.timeout(patience_seconds):
                    await self._some_serve.wait()
            except TimeoutError:
                return

    async def open(
        self,
        *,
        max_context_tokens: int | None = None,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        options: TapeOptions = NO_OPTIONS,
    ) -> OpenedTape:
        """Open a tape on a sidecar as soon as one serves and the bridge reaches it.

        Raises as `TapeClient.open` does, and `PolicyUnavailable` where the bridge does not reach it.
        """
        while True:
            await self._some_serve.wait()
            sidecar = self._next()
            sidecar.opening += 1
            try:
                await self._bridge.reaches(sidecar.name)
                tape = await sidecar.tapes.open(
                    max_context_tokens=max_context_tokens, sampling_policy=sampling_policy, options=options
                )
            except SidecarUnavailable:
                # It has just gone away, as its health will say in a moment: there may be another.
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                sidecar.open_tapes.add(tape.tape_id)
                if self._reader_tokens is not None:
                    self._reader_tokens.add(tape, sidecar.address)
                return tape
            finally:
                sidecar.opening -= 1

    async def watch(self, tape: OpenedTape, *, from_sequence: int = 0) -> AsyncGenerator[tape_pb2.TapeEntry]:
        """Watch a tape where it is, as `TapeClient.watch` does."""
        keeping = recorded.get()
        kept = None if keeping is None else keeping.setdefault(tape.tape_id, [])
        entries = self._owner(tape.tape_id).tapes.watch(tape, from_sequence=from_sequence)
        async with contextlib.aclosing(entries):
            async for entry in entries:
                self._sampled(len(entry.tokens_sampled.token_ids))
                if kept is not None:
                    kept.append(entry)
                yield entry

    async def seal(self, tape: OpenedTape, *, patience_seconds: float | None = None) -> None:
        """Seal a tape where it is, as `TapeClient.seal` does. Its rollout does not count there any more."""
        owner = self._owner(tape.tape_id)
        owner.open_tapes.discard(tape.tape_id)
        await owner.tapes.seal(tape, patience_seconds=patience_seconds)

    async def sample(
        self, tape_id: str, prompt_token_ids: Sequence[int], sampling: types_pb2.SamplingParameters
    ) -> None:
        """Make a call on a tape where it is, as `TapeClient.sample` does."""
        await self._owner(tape_id).tapes.sample(tape_id, prompt_token_ids, sampling)

    def stored(self, tape_id: str, entries: Sequence[tape_pb2.TapeEntry]) -> StoredTape:
        """Return a tape of one of them, as its file has it."""
        return StoredTape.of(tape_id, self._owner(tape_id).model, entries)

    def _owner(self, tape_id: str) -> Sidecar:
        return self.sidecars[tape_id.partition(".")[0]]

    def _next(self) -> Sidecar:
        """Return the sidecar that the next tape goes to: of those that serve, if any do, the one with the fewest."""
        return min(self.sidecars.values(), key=lambda sidecar: (sidecar.health is not Health.SERVING, sidecar.load))

    def _update(self) -> None:
        # Whoever waits for the policy to come back asks whether this one has.
        self.sidecar_name = self._next().name
        serves = any(sidecar.health is Health.SERVING for sidecar in self.sidecars.values())
        yes, no = (self._some_serve, self._none_serves) if serves else (self._none_serves, self._some_serve)
        yes.set()
        no.clear()
