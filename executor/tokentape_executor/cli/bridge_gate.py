"""Where the bridge is, and whether it reaches a sidecar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httpx

from tokentape_executor.errors import PolicyUnavailable
from tokentape_executor.rollout_client import tls

_PROBE_SECONDS = 0.2
_ANSWER_SECONDS = 5.0


class BridgeGate:
    """Lets rollouts through to a bridge that can serve them. Belongs to the event loop that uses it."""

    def __init__(self, url: Callable[[], Awaitable[str]], *, patience_seconds: float) -> None:
        """`url` gives the OpenAI base URL (with `/v1`); `patience_seconds` is how long `reaches` waits."""
        self._url = url
        self._patience_seconds = patience_seconds
        # Bridges are near: a proxy of the environment would only be in the way.
        self._http = httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False, verify=tls())

    async def url(self) -> str:
        """Return the OpenAI base URL."""
        return await self._url()

    async def reaches(self, sidecar_name: str) -> None:
        """Return when the bridge can call the sidecar. Raises `PolicyUnavailable` where it does not come to that."""
        deadline = time.monotonic() + self._patience_seconds
        while (problem := await self._problem(sidecar_name)) is not None:
            if time.monotonic() > deadline:
                raise PolicyUnavailable(f"after {self._patience_seconds:g} s, {problem}")
            await asyncio.sleep(_PROBE_SECONDS)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _problem(self, sidecar_name: str) -> str | None:
        url = (await self._url()).removesuffix("/v1")
        try:
            answer = await self._http.get(f"{url}/health")
            body = cast("dict[str, Any]", answer.json())
        except httpx.TransportError as error:
            return f"the bridge at {url} could not be reached: {type(error).__name__}: {error}"
        except ValueError:
            return f"{url}/health is not a bridge's: it does not answer with JSON"
        if answer.is_error:
            return f"the bridge at {url} answered {answer.status_code}: {body}"
        states = cast("dict[str, str]", body.get("sidecars", {}))
        if sidecar_name not in states:
            return f"the bridge at {url} has no sidecar named {sidecar_name!r}; it has {sorted(states)}"
        state = states[sidecar_name]
        return None if state == "SERVING" else f"the bridge at {url} says of sidecar {sidecar_name!r}: {state}"
