"""What a running NeMo Gym says of itself: its head server's two routes, the same in 0.4 and later.

Gym logs its requests. So that its log, of which errors quote the end, does not fill with ours, its servers are mostly
only connected to, and asked once in a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import yaml

from tokentape_executor.node.supervised import HEALTH_SECONDS, Unwell

_ASK_SECONDS = 10.0
_ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, not listened at


class GymHead:
    """A client of the head server at `url` (`http://HOST:PORT`)."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        """`http` is the caller's, who closes it."""
        self._http = http
        self.url = url.rstrip("/")
        self._servers: list[tuple[str, int]] = []
        """Host and port of each of Gym's servers, as far as they are known."""
        self._asked = -_ASK_SECONDS
        """When all of them last answered, by the monotonic clock."""

    async def config(self) -> dict[str, Any]:
        """Return Gym's resolved configuration. Raises `httpx.HTTPError`, and `Unwell` for what is none."""
        answer = (await self._http.get(f"{self.url}/global_config_dict_yaml")).raise_for_status()
        try:
            # A JSON string that holds YAML.
            parsed: object = yaml.safe_load(json.loads(answer.text))
        except (ValueError, TypeError, AttributeError, yaml.YAMLError):
            parsed = None
        if not isinstance(parsed, dict):
            raise Unwell(f"{self.url}/global_config_dict_yaml is no configuration")
        return cast("dict[str, Any]", parsed)

    async def check(self) -> None:
        """Return where every server of Gym takes connections and, asked again every ten seconds, answers.

        Raises `httpx.HTTPError`, and `Unwell` where there are no servers yet or one takes no connection.
        """
        if not self._servers:
            self._servers = await self._find_servers()
        await asyncio.gather(*(_connect(host, port) for host, port in self._servers))
        if time.monotonic() - self._asked >= _ASK_SECONDS:
            await self._find_servers()
            # Any answer will do: servers need not have a page at their root.
            await asyncio.gather(*(self._http.get(f"http://{host}:{port}/") for host, port in self._servers))
            self._asked = time.monotonic()

    async def _find_servers(self) -> list[tuple[str, int]]:
        answer = (await self._http.get(f"{self.url}/server_instances")).raise_for_status()
        instances = cast("list[dict[str, Any]]", answer.json())
        if not instances:
            raise Unwell("it has no servers yet")
        return [(self._host(instance.get("host")), int(instance["port"])) for instance in instances]

    def agents(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the agents' base URLs by name, from a configuration `{name: {responses_api_agents: {…: {…}}}}`."""
        urls: dict[str, str] = {}
        for name, instance in config.items():
            if isinstance(instance, dict) and "responses_api_agents" in instance:
                (server,) = cast("dict[str, dict[str, Any]]", instance["responses_api_agents"]).values()
                urls[name] = f"http://{self._host(server['host'])}:{server['port']}"
        return urls

    def _host(self, host: str | None) -> str:
        """Return a host to connect to, where a server says at which it listens."""
        return (urlsplit(self.url).hostname or "") if host is None or host in _ANY_HOST else host


async def _connect(host: str, port: int) -> None:
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise Unwell(f"{host}:{port} takes no connection: {error}") from None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
