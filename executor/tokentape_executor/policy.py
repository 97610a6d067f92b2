"""The policy model, as rollouts reach it: a sidecar that has their tapes, and a bridge for their agents."""

from __future__ import annotations

from typing import Protocol

from tokentape_executor.tape_client import TapeClient


class Policy(Protocol):
    """Where rollouts run. Whoever gave it ends it."""

    @property
    def tapes(self) -> TapeClient:
        """The sidecar's tapes."""
        ...

    @property
    def model_name(self) -> str:
        """What requests to the bridge call the model."""
        ...

    @property
    def api_key(self) -> str:
        """What agents show the bridge as their key: one of its `--api-key-file`, or anything where it asks for none."""
        ...

    async def bridge_url(self) -> str:
        """Return the OpenAI base URL (`http://HOST:PORT/v1`) of a bridge that serves and routes to the sidecar.

        Waits while the bridge starts, or starts again. Raises `PolicyUnavailable` where it does not come.
        """
        ...
