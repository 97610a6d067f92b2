"""Rollouts: an agent runs against the policy while its tape is recorded, and the tape becomes samples.

Each rollout has a tape of its own. Its id goes with the agent's requests; the ids that were sampled come back by
`WatchTape` and by no other way. What the agent returns gives the reward, never a token. When the agent is done, has
failed or is cancelled, the tape is sealed, which aborts what still runs for it and refuses what comes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

from tokentape.v1 import types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.errors import AgentFailed, RolloutError
from tokentape_executor.nemo_gym import NemoGym, Row
from tokentape_executor.rollout import Outcome, Rollout
from tokentape_executor.tape_client import NO_OPTIONS, OpenedTape, TapeClient, TapeOptions


class TapeExecutor(ABC):
    """Runs rollouts of one kind of agent; any number at a time. A subclass says how the agent is run."""

    def __init__(self, tapes: TapeClient, *, timeout_seconds: float | None = None) -> None:
        """`timeout_seconds` bounds each rollout; `None` does not."""
        self._tapes = tapes
        self._timeout_seconds = timeout_seconds

    @abstractmethod
    async def run(self, task: Row, tape_id: str) -> Outcome:
        """Run the agent on `task`, its requests to the bridge tagged with `tape_id`; return when it has ended.

        Raises `RolloutError` where the rollout has no outcome.
        """
        ...

    async def rollout(
        self,
        task: Row,
        *,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        max_context_tokens: int | None = None,
        options: TapeOptions = NO_OPTIONS,
    ) -> Rollout:
        """Run one rollout of `task`.

        The fields that `sampling_policy` has hold for every call of the rollout, whatever the agent asks for;
        `max_context_tokens` bounds prompt and completion together in each call; `options` say what else holds for the
        tape. Raises `RolloutError`; the tape is sealed in any case, also when this is cancelled.
        """
        tape = await self._tapes.open(
            max_context_tokens=max_context_tokens, sampling_policy=sampling_policy, options=options
        )
        assembler = Assembler()
        try:
            async with asyncio.timeout(self._timeout_seconds), asyncio.TaskGroup() as tasks:
                # In the group, so that a tape that is lost ends the rollout at once, and not when the agent ends.
                tasks.create_task(self._follow(tape, assembler))
                try:
                    outcome = await self.run(task, tape.tape_id)
                finally:
                    await self._tapes.seal(tape)
        except TimeoutError:
            raise RolloutError(f"the rollout took longer than {self._timeout_seconds} s") from None
        except ExceptionGroup as group:
            # The agent and the tape may both have failed; either's error says what to do.
            raise _first(group) from None
        return Rollout(tape.tape_id, assembler.trajectory(), outcome)

    async def _follow(self, tape: OpenedTape, assembler: Assembler) -> None:
        async with contextlib.aclosing(self._tapes.watch(tape)) as entries:
            async for entry in entries:
                assembler.feed(entry)


class NemoGymExecutor(TapeExecutor):
    """Rollouts by NeMo Gym's agents. A task is a row, as `NemoGym.run` takes it."""

    def __init__(self, tapes: TapeClient, gym: NemoGym, *, timeout_seconds: float | None = None) -> None:
        """`gym` must send its policy calls to a bridge that routes to the sidecar of `tapes`."""
        super().__init__(tapes, timeout_seconds=timeout_seconds)
        self._gym = gym

    async def run(self, task: Row, tape_id: str) -> Outcome:
        """Post the row, tagged with the tape's id, to its agent."""
        report = await self._gym.run(tag_row(task, tape_id))
        if "reward" not in report:
            raise AgentFailed(f"NeMo Gym returned no reward, only {reprlib.repr(sorted(report))}")
        reward = report["reward"]
        # A boolean is an int to Python, and a verifier's mistake.
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise AgentFailed(f"NeMo Gym returned no number as reward but {reprlib.repr(reward)}")
        response = report.get("response")
        details = cast("dict[str, Any]", response).get("incomplete_details") if isinstance(response, dict) else None
        return Outcome(float(reward), details is not None, report)


def tag_row(row: Row, tape_id: str) -> dict[str, Any]:
    """Return a copy of `row` whose model calls carry `tape_id`: metadata is what Gym passes through to the bridge."""
    params = cast("Mapping[str, Any]", row.get("responses_create_params") or {})
    metadata = cast("Mapping[str, str]", params.get("metadata") or {})
    return {**row, "responses_create_params": {**params, "metadata": {**metadata, "tape_id": tape_id}}}


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error in `group` that is none itself."""
    error = group.exceptions[0]
    return _first(cast("ExceptionGroup[Exception]", error)) if isinstance(error, ExceptionGroup) else error
