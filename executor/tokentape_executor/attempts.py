"""One attempt of a rollout: an agent runs while its tape is followed, and the tape is sealed whatever happens.

However an attempt ends, nothing of it is left: the tape is sealed, which aborts what still runs for it at the engine
and refuses what comes later; the agent's task has ended, or was cancelled and waited for; its client is closed. Each of
these takes `CLEANUP_SECONDS` at most. Where agent and tape both failed, the tape's error is raised: a sidecar that is
gone explains why an agent fails, and not the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from tokentape.v1 import types_pb2
from tokentape_executor.agent_errors import from_agent_error
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import AgentFailed, RolloutError
from tokentape_executor.limits import RolloutClock, RolloutLimits
from tokentape_executor.policy import Policy
from tokentape_executor.reward import as_outcome
from tokentape_executor.rollout import Outcome, Rollout
from tokentape_executor.rollout_client import RolloutClient
from tokentape_executor.tape_client import OpenedTape, TapeClient, TapeOptions

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

CLEANUP_SECONDS = 2.0
"""How long a failed attempt may take to seal its tape, and then to end its tasks."""

Agent: TypeAlias = Callable[[RolloutClient], Awaitable[object]]
"""Runs the agent; returns its `Outcome` or its reward."""


@dataclass(frozen=True, slots=True)
class TapeTerms:
    """What holds for every tape of a rollout."""

    sampling_policy: types_pb2.SamplingParameters | None
    max_context_tokens: int | None
    options: TapeOptions
    must_sample: bool = False
    """Whether an attempt that ends without one sampled token has failed."""


class Attempt:
    """A tape, and what was read of it so far."""

    def __init__(
        self, tapes: TapeClient, tape: OpenedTape, client: RolloutClient, limits: RolloutLimits, *, must_sample: bool
    ) -> None:
        """Use `open`."""
        self._must_sample = must_sample
        self._tapes = tapes
        self._tape = tape
        self._client = client
        self._assembler = Assembler()
        self._clock = RolloutClock(limits)

    @classmethod
    async def open(cls, policy: Policy, terms: TapeTerms, limits: RolloutLimits) -> Self:
        """Open a tape for an attempt, which is to be run at once. Raises `RolloutError`."""
        bridge_url = await policy.bridge_url()
        tape = await policy.tapes.open(
            max_context_tokens=terms.max_context_tokens,
            sampling_policy=terms.sampling_policy,
            options=limits.on_tape(terms.options),
        )
        client = RolloutClient.connect(
            bridge_url, tape_id=tape.tape_id, model=policy.model_name, api_key=policy.api_key
        )
        return cls(policy.tapes, tape, client, limits, must_sample=terms.must_sample)

    @property
    def first_prompt(self) -> list[int] | None:
        """The prompt of the first call, as the engine had it; `None` where no call reached the engine."""
        return next(iter(self._assembler.prompts().values()), None)

    async def run(self, agent: Agent) -> Rollout:
        """Run the agent to its end, and seal the tape. Raises `RolloutError`."""
        async with (
            self._client,
            _owned(self._follow(), "the reading of a tape") as following,
            _owned(_run_agent(agent, self._client), "an agent") as running,
        ):
            try:
                outcome = await self._outcome(running, following)
                await self._tapes.seal(self._tape)
                await following
            except RolloutError as error:
                running.cancel()
                of_tape = await self._abandon(following)
                if of_tape is None or isinstance(error, type(of_tape)):
                    raise
                # A lost tape explains what the agent met, and is not explained by it.
                raise type(of_tape)(f"{of_tape}; what came of it: {error}") from error
            except BaseException:
                running.cancel()
                await self._abandon(following)
                raise
            trajectory = self._assembler.trajectory()
            if self._must_sample:
                trajectory.check_sampled()
            return Rollout(self._tape.tape_id, trajectory, outcome)

    async def _outcome(self, running: asyncio.Task[Outcome], following: asyncio.Task[None]) -> Outcome:
        """Wait for the agent, as long as the limits let it and the tape is not lost."""
        async with self._clock.running():
            await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                await asyncio.wait({running})  # somebody else has sealed the tape
        if running.cancelled():
            raise AgentFailed("the agent cancelled itself (CancelledError)")
        return running.result()

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._tapes.watch(self._tape)) as entries:
            async for entry in entries:
                self._assembler.feed(entry)
                self._clock.feed(entry)

    async def _abandon(self, following: asyncio.Task[None]) -> RolloutError | None:
        """Seal the tape and read it to its end; return what keeps that from being done."""
        try:
            await self._tapes.seal(self._tape, patience_seconds=CLEANUP_SECONDS)
            await asyncio.wait({following}, timeout=CLEANUP_SECONDS)
            if following.done():
                following.result()
        except RolloutError as error:
            return error
        return None


async def _run_agent(agent: Agent, client: RolloutClient) -> Outcome:
    try:
        return as_outcome(await agent(client))
    except RolloutError:
        raise
    # A SystemExit, of a tool's argparse for one, would end the whole event loop.
    except (Exception, SystemExit) as error:
        raise from_agent_error(error, client) from error


@contextlib.asynccontextmanager
async def _owned(coroutine: Coroutine[Any, Any, _T], what: str) -> AsyncGenerator[asyncio.Task[_T]]:
    """Run a task that ends with the block: it is then cancelled, and waited for as long as is decent."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        _, still_running = await asyncio.wait({task}, timeout=CLEANUP_SECONDS)
        if still_running:
            _logger.warning("%s goes on although it was cancelled: %r", what, task)
        elif not task.cancelled():
            task.exception()  # was told already, or explained by another error
