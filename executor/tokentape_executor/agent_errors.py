"""What an agent's exception means for its rollout: one table, from what the bridge answered to the executor's errors.

An exception that a call to the policy raised, however deep the agent has wrapped it (`raise … from`, exception groups),
means what the bridge said. Any other is the agent's own, that of a call to another server included.

| the bridge | | error |
|---|---|---|
| not reached, or dropped the connection | | `PolicyUnavailable` |
| 503, 504 | dead engine, no sidecar | `PolicyUnavailable` |
| 404 `not_found` | the tape is gone | `TapeLost` |
| 400 `stale_weights` | the weights changed during the call, more often than the tape allows | `WeightsChanged` |
| other 4xx | bad request, full context, limit of the tape | `RolloutRefused` |
| other 5xx | the engine failed the call | `SidecarFailed` |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import openai

from tokentape_executor.errors import (
    AgentFailed,
    PolicyUnavailable,
    RolloutError,
    RolloutRefused,
    SidecarFailed,
    TapeLost,
    WeightsChanged,
)
from tokentape_executor.rollout_client import RolloutClient

_UNAVAILABLE = frozenset({503, 504})
_SERVER_ERROR = 500


def from_agent_error(error: BaseException, client: RolloutClient) -> RolloutError:
    """Return what `error`, which the agent of the rollout of `client` raised, means for the rollout."""
    for cause in _causes(error, set()):
        if isinstance(cause, RolloutError):
            return type(cause)(f"{cause} (the agent raised {_described(error)})")
        if isinstance(cause, openai.APIConnectionError | openai.APIStatusError) and _is_of(cause, client):
            return _of_policy(cause)
    return AgentFailed(_described(error))


def _of_policy(error: openai.APIConnectionError | openai.APIStatusError) -> RolloutError:
    if isinstance(error, openai.APIConnectionError):
        reason = error.__cause__ or error
        return PolicyUnavailable(f"the bridge could not be reached: {type(reason).__name__}: {reason}")
    told = f"the bridge answered {error.status_code} ({error.code or 'no code'}): {_message(error)}"
    if error.status_code in _UNAVAILABLE:
        return PolicyUnavailable(told)
    if error.code == "not_found":
        return TapeLost(told)
    if error.code == "stale_weights":
        return WeightsChanged(told)
    return SidecarFailed(told) if error.status_code >= _SERVER_ERROR else RolloutRefused(told)


def _message(error: openai.APIStatusError) -> str:
    """Return the bridge's words, without what the client puts before them."""
    body = cast("dict[str, object]", error.body) if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def _is_of(error: openai.APIError, client: RolloutClient) -> bool:
    """Whether the failed request went to the rollout's bridge."""
    asked, bridge = error.request.url, client.base_url
    return (asked.scheme, asked.host, asked.port) == (bridge.scheme, bridge.host, bridge.port)


def _described(error: BaseException) -> str:
    """Return the exception's type and text, and those of a group's members."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, BaseExceptionGroup):
        members = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return f"{told}: {'; '.join(map(_described, members))}"
    return told


def _causes(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield `error` and all that it was raised for: its group's members, and its cause, and theirs; each once."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _causes(member, seen)
    yield from _causes(error.__cause__, seen)
