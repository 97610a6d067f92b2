"""NeMo Gym's agents, as rollouts use them: `POST /run`, by HTTP. `node/gym.py` is what starts Gym."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import httpx

from tokentape_executor.errors import AgentFailed, AgentUnavailable
from tokentape_executor.rollout import Row

_QUOTED_CHARACTERS = 1000
_GONE_SECONDS = 10.0
"""How long an agent whose server takes no connection may be looked up again before that is an error: so long as it may
take to be noticed that it has ended. Waiting for the directory, while Gym starts again, does not count."""
_GONE_INTERVAL_SECONDS = 0.5


class GymAgents:
    """NeMo Gym's agents, wherever they are just now. Belongs to one event loop."""

    def __init__(self, directory: Callable[[], Awaitable[Mapping[str, str]]]) -> None:
        """Look agents up in `directory`, which gives their base URLs by name, each time that one is to run.

        It may wait until Gym is there, and raises `AgentUnavailable` (or `StartFailed`) where it is not.
        """
        self._directory = directory
        # A rollout takes as long as it takes; the caller bounds it. Loopback wants no proxy.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None), limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def run(self, row: Row) -> dict[str, Any]:
        """Run one rollout and return the verifier's response, with `reward` and the agent's `response`.

        The row's `agent_ref.name` picks the agent. Takes as long as the rollout does; cancelling it stops the waiting,
        not the agent. Raises `AgentFailed` where there is no such agent, or it answers with an error or with no JSON
        object; `AgentUnavailable` where it does not answer.
        """
        name = str(cast("Mapping[str, str]", row.get("agent_ref") or {}).get("name", ""))
        response = await self._post(name, dict(row))
        if response.is_error:
            raise AgentFailed(f"agent {name} answered {response.status_code}: {_readable(response.text)}")
        try:
            report = response.json()
        except ValueError:
            report = None
        if not isinstance(report, dict):
            raise AgentFailed(
                f"agent {name} answered {response.status_code} without a JSON object: {_readable(response.text)}"
            )
        return cast("dict[str, Any]", report)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _post(self, name: str, row: dict[str, Any]) -> httpx.Response:
        deadline = time.monotonic() + _GONE_SECONDS
        while True:
            asked = time.monotonic()
            url = await self._url(name)
            deadline += time.monotonic() - asked
            try:
                return await self._http.post(f"{url}/run", json=row)
            except httpx.ConnectError as error:
                # Nothing was sent. It may have ended, and its end not be known yet.
                if time.monotonic() > deadline:
                    raise _unavailable(name, error) from error
            except httpx.HTTPError as error:
                raise _unavailable(name, error) from error
            await asyncio.sleep(_GONE_INTERVAL_SECONDS)

    async def _url(self, name: str) -> str:
        agents = await self._directory()
        if not name:
            raise AgentFailed(f"the row names no agent (agent_ref.name); NeMo Gym has {sorted(agents)}")
        if name not in agents:
            raise AgentFailed(f"NeMo Gym has no agent {name!r}; it has {sorted(agents)}")
        return agents[name]


def _unavailable(name: str, error: httpx.HTTPError) -> AgentUnavailable:
    return AgentUnavailable(f"agent {name}: {type(error).__name__}: {error}")


def _readable(text: str) -> str:
    """Return `text` for a message: at most its ends, and without the escapes of JSON within JSON within JSON.

    Each of Gym's servers quotes the answer of the one behind it, which doubles the backslashes; the cause is the last.
    """
    text = re.sub(r"\\+n", "\n", text)
    text = re.sub(r"\\+([\"'])", r"\1", text)
    text = re.sub(r"\\{2,}", r"\\", text)
    if len(text) <= _QUOTED_CHARACTERS:
        return text
    half = _QUOTED_CHARACTERS // 2
    return f"{text[:half]} […] {text[-half:]}"
