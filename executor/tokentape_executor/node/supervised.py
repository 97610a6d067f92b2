"""A service that is kept running: started, watched, and started again when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import httpx

from tokentape_executor.errors import StartFailed
from tokentape_executor.processes import ChildProcess

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

HEALTH_SECONDS = 5.0
"""How long a server may take to answer a health check."""
_CHECK_INTERVAL_SECONDS = 1.0
_ENDED_INTERVAL_SECONDS = 0.1
_FAILED_CHECKS = 3
"""So many in succession, and it hangs."""
_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 30.0
_STEADY_SECONDS = 60.0
"""What has run so long is started again at once when it ends."""


@dataclass(frozen=True, slots=True)
class Service(Generic[_T]):
    """Something that runs."""

    value: _T
    """What it offers."""
    check: Callable[[], Awaitable[None]]
    """Returns where it is well; raises `httpx.HTTPError` or `Unwell`."""
    process: ChildProcess | None = None
    """`None`: somebody else's, of which there is no more than its answers."""


class Unwell(Exception):
    """A service answers, but not well."""


class Supervised(Generic[_T]):
    """Keeps one service running."""

    def __init__(
        self,
        name: str,
        open_service: Callable[[], AbstractAsyncContextManager[Service[_T]]],
        publish: Callable[[_T | None, str], None],
    ) -> None:
        """`open_service` starts it (raises `StartFailed`) and stops it on leaving.

        `publish` gets what it offers, or `None` and the reason as soon as it offers nothing.
        """
        self._name = name
        self._open = open_service
        self._publish = publish

    async def run(self) -> NoReturn:
        """Keep it running until cancelled. Raises `StartFailed` where it does not even start for the first time."""
        await self._run_once()
        delay = 0.0
        while True:
            await asyncio.sleep(delay)
            started = time.monotonic()
            try:
                await self._run_once()
            except StartFailed as error:
                self._tell(str(error))
            steady = time.monotonic() - started > _STEADY_SECONDS
            delay = 0.0 if steady else min(max(_FIRST_DELAY_SECONDS, 2 * delay), _LONGEST_DELAY_SECONDS)

    async def _run_once(self) -> None:
        """Start it, and return when it has ended, by itself or by us because it hung."""
        async with self._open() as service:
            _logger.info("%s runs: %s", self._name, service.value)
            self._publish(service.value, "")
            try:
                self._tell(await _problem(service))
            except asyncio.CancelledError:
                self._publish(None, "the node is shutting down")
                raise

    def _tell(self, problem: str) -> None:
        _logger.error("%s %s", self._name, problem)
        self._publish(None, f"{self._name} {problem}" if not problem.startswith(self._name) else problem)


async def _problem(service: Service[_T]) -> str:
    """Return what is the matter with a service as soon as something is."""
    watches = [asyncio.create_task(_hangs(service.check))]
    if service.process is not None:
        watches.append(asyncio.create_task(_ends(service.process)))
    try:
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        problem = done.pop().result()
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
    return problem if service.process is None else f"{problem}; {service.process.log_end()}"


async def _ends(process: ChildProcess) -> str:
    while process.running:  # noqa: ASYNC110 - its leash is a child, for which asyncio has no better way
        await asyncio.sleep(_ENDED_INTERVAL_SECONDS)
    return f"ended with status {process.status}"


async def _hangs(check: Callable[[], Awaitable[None]]) -> str:
    failed = 0
    while True:
        await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
        try:
            await check()
        except (httpx.HTTPError, Unwell) as error:
            failed += 1
            if failed == _FAILED_CHECKS:
                return f"did not answer well {failed} times in succession, at last: {type(error).__name__}: {error}"
        else:
            failed = 0


async def stop(process: ChildProcess) -> None:
    """Stop a process, also where this is cancelled meanwhile; return when all of it has ended."""
    stopping = asyncio.ensure_future(asyncio.to_thread(process.stop))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await stopping
        raise
