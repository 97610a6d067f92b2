"""Rollouts of any agent: it runs against the policy while its tape is recorded, and the tape becomes samples.

Each attempt of a rollout has a tape of its own. The agent's client names it with every call; the ids that were sampled
come back by `WatchTape` and by no other way. What the agent returns gives the reward, never a token. When the agent is
done, has failed or is cancelled, the tape is sealed, which aborts what still runs for it and refuses what comes later.

A rollout fails with a `RolloutError`, whatever its agent raised. It is run again as often as `retries` says if that
may help; then it raises the last error, or, by `OnFailure.PLACEHOLDER`, gives a placeholder (`placeholder.py`). One
that is cancelled does neither, and ends at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable

from tokentape.v1 import types_pb2
from tokentape_executor import placeholder
from tokentape_executor.attempts import Agent, TapeTerms
from tokentape_executor.limits import NO_LIMITS, RolloutLimits
from tokentape_executor.loop_watch import watching_loop
from tokentape_executor.placeholder import Messages
from tokentape_executor.policy import Policy
from tokentape_executor.retries import Failure, attempt
from tokentape_executor.rollout import FailedRollout, Outcome, Rollout, Row
from tokentape_executor.rollout_client import RolloutClient
from tokentape_executor.settings import OnFailure
from tokentape_executor.tape_client import NO_OPTIONS, TapeOptions

__all__ = [
    "NO_LIMITS",
    "FailedRollout",
    "OnFailure",
    "Outcome",
    "Rollout",
    "RolloutClient",
    "RolloutLimits",
    "Row",
    "TapeExecutor",
    "TapeOptions",
]


class TapeExecutor(ABC):
    """Runs rollouts of one kind of agent; any number at a time. A subclass says how the agent is run."""

    def __init__(
        self,
        policy: Policy,
        *,
        limits: RolloutLimits = NO_LIMITS,
        retries: int = 0,
        on_failure: OnFailure = OnFailure.RAISE,
    ) -> None:
        """`limits` hold for each attempt; a rollout has `retries` more attempts where failures may pass."""
        if retries < 0:
            raise ValueError(f"retries: must be 0 or more, not {retries}")
        self._policy = policy
        self._limits = limits
        self._retries = retries
        self._on_failure = on_failure

    @abstractmethod
    async def run(self, task: Row, client: RolloutClient) -> Outcome | float:
        """Run the agent on `task`, which makes its calls by `client` or by its base URL; return when it has ended.

        Returns the outcome, or just the reward. What it raises fails the rollout: as what the bridge said where a call
        to the policy raised it (`agent_errors.py`), as itself where it is a `RolloutError`, else as `AgentFailed`.
        """
        ...

    def placeholder_messages(self, task: Row) -> Messages:
        """Return the chat from which a placeholder is sampled for `task` where no attempt has reached the engine.

        By default that of the task's first of these fields: `responses_create_params.input`, `messages`, `prompt`,
        `question`.
        """
        return placeholder.messages_of(task)

    async def rollout(
        self,
        task: Row,
        *,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        max_context_tokens: int | None = None,
        options: TapeOptions = NO_OPTIONS,
        must_sample: bool = False,
    ) -> Rollout:
        """Run one rollout of `task`.

        The fields that `sampling_policy` has hold for every call of the rollout, whatever the agent asks for;
        `max_context_tokens` bounds prompt and completion together in each call; `options` say what else holds for the
        tape. With `must_sample` an attempt that leaves no sampled token fails as `NothingSampled`, as any other failure
        does; else such a rollout has no samples. Raises `RolloutError`, its text with the number of attempts; the tape
        is sealed in any case, also when this is cancelled.
        """
        result = await self._settle(task, TapeTerms(sampling_policy, max_context_tokens, options, must_sample))
        if isinstance(result, Failure):
            raise result.as_error()
        return result

    async def rollouts(
        self,
        tasks: Iterable[Row],
        *,
        concurrency: int | None = None,
        fail_fast: bool = False,
        sampling_policy: types_pb2.SamplingParameters | None = None,
        max_context_tokens: int | None = None,
        options: TapeOptions = NO_OPTIONS,
        must_sample: bool = False,
    ) -> list[Rollout | FailedRollout]:
        """Run a rollout of each of `tasks`, at most `concurrency` at a time; return their results in the tasks' order.

        A rollout that fails is a `FailedRollout` in its place, and leaves the others alone. With `fail_fast` the first
        that fails cancels the others, and its `RolloutError` is raised. The rest is as in `rollout`.
        """
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency: must be 1 or more, not {concurrency}")
        rows = list(tasks)
        slots = asyncio.Semaphore(concurrency or max(len(rows), 1))
        terms = TapeTerms(sampling_policy, max_context_tokens, options, must_sample)

        async def one(index: int, row: Row) -> Rollout | FailedRollout:
            async with slots:
                result = await self._settle(row, terms)
            if isinstance(result, Rollout):
                return result
            if fail_fast:
                raise result.as_error()
            return FailedRollout(index, result.as_error(), result.attempts)

        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(index, row)) for index, row in enumerate(rows)]
        except BaseExceptionGroup as failed:
            # The first is the cause of all that follows.
            root = failed.exceptions[0]
            raise root from root.__cause__
        return [task.result() for task in running]

    async def _settle(self, task: Row, terms: TapeTerms) -> Rollout | Failure:
        """Run the rollout with its retries, and replace it where it fails all the same and that is wanted."""
        with watching_loop():
            result = await self._attempt(lambda client: self.run(task, client), terms)
            if isinstance(result, Failure) and self._on_failure is OnFailure.PLACEHOLDER:
                return await self._replace(task, terms, result)
            return result

    async def _replace(self, task: Row, terms: TapeTerms, failure: Failure) -> Rollout | Failure:
        """Return a placeholder; the failure, with what kept it from being replaced, where that fails too."""
        try:
            agent = self._placeholder_agent(task, failure)
        except Exception as error:  # noqa: BLE001 - a subclass's: it must not hide why the rollout failed
            return failure.without_placeholder(error)
        result = await self._attempt(agent, placeholder.one_token(terms))
        if isinstance(result, Failure):
            return failure.without_placeholder(result.error)
        return failure.replaced_by(result)

    def _placeholder_agent(self, task: Row, failure: Failure) -> Agent:
        if failure.first_prompt is not None:
            return placeholder.from_prompt(self._policy.tapes, failure.first_prompt)
        return placeholder.from_messages(self.placeholder_messages(task))

    async def _attempt(self, agent: Agent, terms: TapeTerms) -> Rollout | Failure:
        return await attempt(agent, self._policy, terms, limits=self._limits, retries=self._retries)
