"""The client that an agent gets: OpenAI's own, with the rollout's tape in its base URL."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping
from typing import Any, Self

import openai

from tokentape_executor.log_redaction import hide_tapes

_API = "/v1"

NO_KEY = "none"
"""What is shown as the key to a bridge that asks for none; OpenAI's client must have one."""


class RolloutClient(openai.AsyncOpenAI):
    """An `AsyncOpenAI` whose calls are recorded on one rollout's tape. It is closed when the rollout ends.

    Its `base_url`, `http://HOST:PORT/tapes/TAPE/v1`, serves any other OpenAI client as well, with its `api_key`.
    """

    def __init__(self, *, tape_id: str, model: str, **options: Any) -> None:
        """`options`: as `AsyncOpenAI` takes them."""
        hide_tapes()
        super().__init__(**options)
        self.tape_id = tape_id
        """The rollout's tape; the last part but one of the base URL."""
        self.model = model
        """What requests call the model."""

    @classmethod
    def connect(cls, bridge_url: str, *, tape_id: str, model: str, api_key: str = NO_KEY) -> Self:
        """Return a client of the bridge at `bridge_url` (`http://HOST:PORT/v1`). Nothing is connected yet.

        It waits for answers as long as the rollout may take, and makes no call twice by itself: a call made again is
        one more on the tape, and whoever gave up after some retries would name the last problem, not the first.
        """
        return cls(
            tape_id=tape_id,
            model=model,
            base_url=f"{bridge_url.rstrip('/').removesuffix(_API)}/tapes/{tape_id}{_API}",
            api_key=api_key,
            max_retries=0,
            timeout=None,
            # Bridges are near, so that a proxy of the environment would only be in the way.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=None, verify=tls()),
        )

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """Return a client of the same tape and connections with some `options` changed, as `AsyncOpenAI.copy` does."""
        kept = {"tape_id": self.tape_id, "model": self.model}
        return super().copy(_extra_kwargs={**kept, **_extra_kwargs}, **options)

    with_options = copy


@functools.cache
def tls() -> ssl.SSLContext:
    """Return what every client would otherwise load anew, which takes longer than a whole call."""
    return ssl.create_default_context()
