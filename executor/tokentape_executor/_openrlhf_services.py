"""What an executor has started: on its event loop, and shared with the other executors of its node."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import psutil

from tokentape_executor.errors import ExecutorError, StartFailed
from tokentape_executor.executor import TapeExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember
from tokentape_executor.policy import Policy
from tokentape_executor.rollout_client import NO_KEY
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import TapeClient

_T = TypeVar("_T")

_CLOSE_SECONDS = 4.5
"""How long closing may take in all."""
_CANCEL_SECONDS = 2.0
"""How long what runs may take to end when it is cancelled: it seals its tapes."""


class EmbeddedPolicy:
    """The policy that an executor serves itself; see `policy.Policy`."""

    def __init__(self, tapes: TapeClient, model_name: str, bridge_url: Callable[[], Awaitable[str]]) -> None:
        """`bridge_url` returns the URL of a bridge that serves."""
        self.tapes = tapes
        self.model_name = model_name
        self.api_key = NO_KEY
        self._bridge_url = bridge_url

    async def bridge_url(self) -> str:
        """Return the bridge's URL; see `policy.Policy`."""
        return await self._bridge_url()


class _Outside:
    """What must not outlive the executor, and no event loop is needed to end: its membership."""

    def __init__(self) -> None:
        self._member: NodeMember | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def take(self, member: NodeMember) -> None:
        """Keep `member` until `stop`. After that, makes it leave and raises `StartFailed`."""
        with self._lock:
            if not self._stopped:
                self._member = member
                return
        member.leave()
        raise shut_down_while_starting()

    def stop(self) -> None:
        """End it; blocks. From any thread; again does nothing."""
        with self._lock:
            self._stopped = True
            member, self._member = self._member, None
            if member is not None:
                member.leave()


class Services:
    """Everything that one executor has started, from the first rollout to `close`."""

    def __init__(self, owner: object, settings: ExecutorSettings) -> None:
        """Start nothing yet. What is outside this process ends with `owner`, or with the interpreter, at the latest."""
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.on_loop = contextlib.AsyncExitStack()
        """What lives on the event loop; to be closed there."""
        self.member: NodeMember | None = None
        self.gym: GymAgents | None = None
        self.policy: Policy | None = None
        self.rollouts: TapeExecutor | None = None
        self._outside = _Outside()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._finalizer = weakref.finalize(owner, self._outside.stop)

    def join(self, member: NodeMember) -> None:
        """Keep a membership until these services end. Raises `StartFailed` where they have ended."""
        self._outside.take(member)
        self.member = member

    async def run(self, work: Coroutine[Any, Any, _T], closed: Callable[[], ExecutorError]) -> _T:
        """Return what `work` returns; `close` cancels it, and the error of `closed` is raised then."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self._closed or (caller is not None and caller.cancelling()):
                raise
            raise closed() from None

    async def discard(self) -> None:
        """End these services, which have not come to be, from their event loop."""
        await asyncio.to_thread(self._stop_outside)
        await self.on_loop.aclose()

    def close(self) -> None:
        """End these services, from any thread, within five seconds. On the loop's own thread its part is done later."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._closed = True
        closing = self._begin_closing()
        self._stop_outside()
        if closing is not None:
            with contextlib.suppress(TimeoutError):
                closing.result(max(0.0, deadline - time.monotonic()))
        elif not self.loop.is_closed() and not self.loop.is_running():
            self.loop.run_until_complete(self._close_on_loop())

    def _begin_closing(self) -> Future[None] | None:
        """Start closing what lives on the loop; return what to wait for, if it runs in another thread."""
        if not self.loop.is_running():
            return None
        if _running_loop() is not self.loop:
            return asyncio.run_coroutine_threadsafe(self._close_on_loop(), self.loop)
        _closings.add(task := self.loop.create_task(self._close_on_loop()))
        task.add_done_callback(_closings.discard)
        return None

    def _stop_outside(self) -> None:
        self._outside.stop()
        self._finalizer.detach()

    async def _close_on_loop(self) -> None:
        running = [task for task in self._running if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_SECONDS)
        await self.on_loop.aclose()


_closings: set[asyncio.Task[None]] = set()
"""Owns the closings that `Services.close` has left to their loops."""


def shut_down_while_starting() -> StartFailed:
    """Return the error of those who wait for a start that `shutdown` ended."""
    return StartFailed("the executor was shut down while it started")


async def completed(result: _T | Awaitable[_T]) -> _T:
    """Return what an overridable method returned, awaited if it was a coroutine."""
    return await cast("Awaitable[_T]", result) if inspect.isawaitable(result) else cast("_T", result)


def node_group(settings: ExecutorSettings) -> str:
    """Return what the executors have in common that share a node's bridge and Gym.

    The settings' group; else, in Ray, the cluster and the job; else this process.
    """
    if settings.node_group is not None:
        return settings.node_group
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        context = ray.get_runtime_context()
        return f"ray {context.gcs_address} job {context.get_job_id()}"
    # With its age: a number comes again.
    return f"process {os.getpid()} of {psutil.Process().create_time()}"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
