"""What keeper and members tell each other over the Unix socket: one JSON object a line.

A member says one thing, `Join`, and leaves by closing its side of the connection. The keeper answers with its `State`,
again after every change, until the member has left; then it closes the connection, and where that member was the last
one, only when everything has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """One line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def line(self) -> bytes:
        """Return the message as it is sent."""
        return self.model_dump_json().encode() + b"\n"


class Join(Message):
    """The member's only message."""

    sidecars: Mapping[str, str]
    """Name to gRPC address."""


class State(Message):
    """How things are at the keeper's."""

    bridge_url: str | None = None
    """The OpenAI base URL; `None` while the bridge does not run."""
    bridge_problem: str = ""
    """While it does not run: why, as far as that is known."""
    served: tuple[str, ...] = ()
    """Names of the sidecars that the bridge has had connections to, so that it knows their models."""
    sidecar_problem: str = ""
    """What the bridge says of those that are not among them."""
    agents: Mapping[str, str] | None = None
    """Gym's agents, name to base URL; `None` while Gym does not run."""
    gym_problem: str = ""
    """While it does not run: why, as far as that is known."""
    refused: str | None = None
    """Why this member is none."""
    failed: str | None = None
    """Why bridge or Gym could not be started at all. The keeper ends."""


_MessageT = TypeVar("_MessageT", bound=Message)


def parse(kind: type[_MessageT], line: bytes) -> _MessageT:
    """Return the message in a line. Raises pydantic's `ValidationError` (a `ValueError`)."""
    return kind.model_validate_json(line)
