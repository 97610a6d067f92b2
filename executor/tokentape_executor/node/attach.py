"""A NeMo Gym that somebody else runs: its agents, and the address at which it expects the policy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tokentape_executor.errors import StartFailed
from tokentape_executor.node.gym_head import GymHead
from tokentape_executor.node.ports import Address, reserved
from tokentape_executor.node.spec import AttachedGym
from tokentape_executor.node.supervised import HEALTH_SECONDS, Service, Unwell


@dataclass(frozen=True, slots=True)
class AttachPlan:
    """How Gym is found, again after it was away."""

    gym: AttachedGym
    policy_base_url: str
    """What it called the policy's URL the first time; it must not change."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Service[Mapping[str, str]]]:
        """Ask Gym for its agents; leave it running. Raises `StartFailed`."""
        async with httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False) as http:
            head = GymHead(http, self.gym.url)
            config = await _config(head)
            if _policy_base_url(self.gym, config) != self.policy_base_url:
                raise StartFailed(
                    f"{_named(self.gym)} now has another policy_base_url than {self.policy_base_url}, where the bridge "
                    "listens; start it with that one again"
                )
            yield Service(head.agents(config), head.check)


async def policy_base_url(gym: AttachedGym) -> str:
    """Return where this Gym calls the policy. Raises `StartFailed` where it cannot be attached to."""
    async with httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False) as http:
        return _policy_base_url(gym, await _config(GymHead(http, gym.url)))


@contextlib.contextmanager
def policy_address(gym: AttachedGym, base_url: str) -> Generator[Address]:
    """Reserve, for the bridge, the address that Gym calls. Raises `StartFailed` where that is not to be had."""
    where = urlsplit(base_url)
    try:
        if where.scheme != "http" or where.path.rstrip("/") != "/v1" or not where.hostname or not where.port:
            raise StartFailed(
                f"{_named(gym)} calls the policy at {base_url}, where no bridge can be; start it with "
                "+policy_base_url=http://127.0.0.1:PORT/v1 and a PORT that is free"
            )
        reservation = reserved(where.hostname, where.port)
    except ValueError as error:
        raise StartFailed(f"{_named(gym)} has the policy_base_url {base_url!r}: {error}") from None
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(reservation)
        except OSError as error:
            raise StartFailed(
                f"the bridge cannot listen at {where.netloc}, where {_named(gym)} calls the policy: {error.strerror}; "
                "stop what listens there, or start Gym on this machine with +policy_base_url=http://127.0.0.1:PORT/v1 "
                "and a PORT that is free"
            ) from None
        yield address


def _named(gym: AttachedGym) -> str:
    return f"the NeMo Gym of TOKENTAPE_GYM_URL ({gym.url})"


async def _config(head: GymHead) -> dict[str, Any]:
    try:
        return await head.config()
    except httpx.HTTPStatusError as error:
        raise StartFailed(
            f"at {head.url} (TOKENTAPE_GYM_URL) is no head server of NeMo Gym 0.4 or newer: {error}"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartFailed(
            f"no NeMo Gym answers at {head.url} (TOKENTAPE_GYM_URL): {type(error).__name__}: {error}; start it there, "
            "or leave TOKENTAPE_GYM_URL away and one is started"
        ) from None
    except Unwell as error:
        raise StartFailed(f"at {head.url} (TOKENTAPE_GYM_URL) is no head server of NeMo Gym: {error}") from None


def _policy_base_url(gym: AttachedGym, config: Mapping[str, Any]) -> str:
    """Return the one URL in Gym's configuration, whose policy must be called as ours is."""
    name = config.get("policy_model_name")
    if name != gym.policy_model_name:
        raise StartFailed(
            f"{_named(gym)} calls the policy {name!r}, the sidecar {gym.policy_model_name!r}; start it with "
            f"+policy_model_name={gym.policy_model_name}"
        )
    urls = config.get("policy_base_url")
    if isinstance(urls, list) and len(urls) == 1:  # pyright: ignore[reportUnknownArgumentType] - from YAML
        urls = urls[0]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(urls, str):
        raise StartFailed(f"{_named(gym)} has not one policy_base_url but {urls!r}; start it with one")
    return urls
