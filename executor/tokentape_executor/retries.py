"""A rollout's attempts: run until one succeeds, or trying again is of no use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Any, cast

import httpx

from tokentape_executor.attempts import Agent, Attempt, TapeTerms
from tokentape_executor.errors import ExecutorError, RolloutError
from tokentape_executor.limits import RolloutLimits
from tokentape_executor.policy import Policy
from tokentape_executor.rollout import Rollout
from tokentape_executor.rollout_client import tls

_logger = logging.getLogger(__name__)

RECOVERY_SECONDS = 30.0
"""How long a retry waits for a sidecar or a bridge that is away."""

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout of which every attempt failed."""

    error: RolloutError
    """The last attempt's."""
    attempts: int
    first_prompt: list[int] | None
    """The first prompt of the last attempt that had a call at the engine; `None`: none had."""

    def as_error(self) -> RolloutError:
        """Return the error, with the number of attempts in its text where there were several."""
        if self.attempts == 1:
            return self.error
        error = type(self.error)(f"{self.error} (the last of {self.attempts} attempts)")
        error.__cause__ = self.error.__cause__
        return error

    def without_placeholder(self, problem: Exception) -> Failure:
        """Return this failure, its error telling as well why there is no placeholder."""
        error = type(self.error)(f"{self.error}; no placeholder: {type(problem).__name__}: {problem}")
        error.__cause__ = self.error.__cause__
        return replace(self, error=error)

    def replaced_by(self, placeholder: Rollout) -> Rollout:
        """Return the placeholder as the one of this rollout."""
        return replace(placeholder, attempts=self.attempts, failure=f"{type(self.error).__name__}: {self.error}")


async def attempt(
    agent: Agent, policy: Policy, terms: TapeTerms, *, limits: RolloutLimits, retries: int
) -> Rollout | Failure:
    """Run the agent, each time on a new tape, until it succeeds, up to `retries` times more than once."""
    first_prompt: list[int] | None = None
    number = 1
    while True:
        this: Attempt | None = None
        try:
            this = await Attempt.open(policy, terms, limits)
            return replace(await this.run(agent), attempts=number)
        except RolloutError as error:
            first_prompt = (this and this.first_prompt) or first_prompt
            if not error.retryable or number > retries:
                return Failure(error, number, first_prompt)
            _logger.warning("attempt %d of a rollout failed and is made again: %s", number, error)
            await _pause(number, policy)
        number += 1


async def _pause(number: int, policy: Policy) -> None:
    """Wait before the attempt after `number`, and until the policy serves: an agent may fail of that in any words."""
    await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** (number - 1), _LONGEST_PAUSE_SECONDS))
    # Where it does not come back in time, the next attempt says so.
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(RECOVERY_SECONDS),
            httpx.AsyncClient(trust_env=False, timeout=_ANSWER_SECONDS, verify=tls()) as http,
        ):
            while not await _serves(policy, http):  # noqa: ASYNC110 - in another process
                await asyncio.sleep(_POLL_SECONDS)


async def _serves(policy: Policy, http: httpx.AsyncClient) -> bool:
    """Whether a bridge answers, and says that the policy's sidecar serves."""
    try:
        url = (await policy.bridge_url()).rstrip("/").removesuffix("/v1")
        health = (await http.get(f"{url}/health")).raise_for_status().json()
    # What stands before a bridge while that is away may answer anything.
    except (ExecutorError, httpx.HTTPError, ValueError):
        return False
    states = cast("dict[str, Any]", health).get("sidecars") if isinstance(health, dict) else None
    return isinstance(states, dict) and cast("dict[str, str]", states).get(policy.tapes.sidecar_name) == "SERVING"
