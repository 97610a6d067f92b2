"""An executor's side of its node: joining, knowing where bridge and Gym are, leaving.

A thread holds the connection to the keeper. When that ends without our leaving, the keeper has died, and bridge and Gym
with it; the thread joins again, which starts another, while `bridge_url` and `gym_agents` wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from tokentape_executor.errors import AgentUnavailable, PolicyUnavailable, RolloutError, StartFailed
from tokentape_executor.node.entering import Connection, enter
from tokentape_executor.node.messages import Join, State
from tokentape_executor.node.shared import Shared
from tokentape_executor.node.spec import NodeSpec

_T = TypeVar("_T")

_LEAVE_SECONDS = 3.8
_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 30.0
_FIRST_START_SLACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _View:
    """What the member knows."""

    state: State = field(default_factory=State)
    """The keeper's, as it was last told."""
    joined: bool = False
    """Whether it has ever joined."""
    was_up: bool = False
    """Whether all that the spec wants has ever run at once."""
    problem: str = ""
    """Why there is no keeper, while there is none."""
    failed: str | None = None
    """Why it never came up: for good."""
    left: bool = False


class NodeMember:
    """One executor's membership. Every method may be called from any thread and any event loop."""

    def __init__(self, spec: NodeSpec, sidecars: Mapping[str, str]) -> None:
        """Use `join`."""
        self.spec = spec
        self._join = Join(sidecars=sidecars)
        self._view = Shared(_View())
        self._leaving = threading.Event()
        self._connection: Connection | None = None
        self._connection_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="node member", daemon=True)

    @classmethod
    async def join(cls, spec: NodeSpec, sidecars: Mapping[str, str]) -> Self:
        """Join the node of `spec`, starting it if nobody has, and put `sidecars` before its bridge.

        `sidecars` are names to gRPC addresses. Returns before bridge and Gym are ready. Raises `StartFailed` where the
        keeper cannot be started, or another member has a sidecar of one of these names.
        """
        member = cls(spec, sidecars)
        member._thread.start()
        try:
            await member._view.wait_for(_has_joined)
        except BaseException:
            # Also when cancelled: what was started here is ended here.
            await asyncio.to_thread(member.leave)
            raise
        return member

    async def bridge_url(self) -> str:
        """Return the bridge's OpenAI base URL (`http://HOST:PORT/v1`); it serves this member's sidecars.

        Waits while the bridge starts, or starts again. Raises `StartFailed` where it, or Gym, could not be started for
        the first time, `PolicyUnavailable` where it does not come back in time.
        """
        names = self._join.sidecars.keys()

        def take(view: _View) -> str | None:
            return view.state.bridge_url if names <= set(view.state.served) else None

        def reason(view: _View) -> str:
            return view.problem or view.state.bridge_problem or view.state.sidecar_problem or "it is starting"

        return await self._wait(take, PolicyUnavailable, "the bridge does not serve this executor's sidecars", reason)

    async def gym_agents(self) -> Mapping[str, str]:
        """Return the base URLs of Gym's agents, by name.

        Waits while Gym starts, or starts again. Raises `StartFailed` as `bridge_url` does, `AgentUnavailable` where it
        does not come back in time.
        """
        if self.spec.gym is None:
            raise StartFailed("this node has no NeMo Gym")

        def reason(view: _View) -> str:
            return view.problem or view.state.gym_problem or view.state.bridge_problem or "it is starting"

        return await self._wait(lambda view: view.state.agents, AgentUnavailable, "NeMo Gym does not run", reason)

    def leave(self) -> None:
        """Leave. Blocks until the member has left and, if it was the last, until all has ended: less than 4 s.

        Again: nothing. Whoever waits for the bridge or Gym gets `PolicyUnavailable` or `AgentUnavailable`.
        """
        self._leaving.set()
        self._view.update(lambda view: replace(view, left=True))
        with self._connection_lock:
            if self._connection is not None:
                self._connection.leave()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)
        with self._connection_lock:
            if self._connection is not None:
                self._connection.abandon()

    async def _wait(
        self,
        take: Callable[[_View], _T | None],
        kind: type[RolloutError],
        what: str,
        reason: Callable[[_View], str],
    ) -> _T:
        def take_or_raise(view: _View) -> _T | None:
            if view.failed is not None:
                raise StartFailed(view.failed)
            if view.left:
                raise kind(f"{what}: the executor was shut down")
            return take(view)

        seconds = self._patience_seconds()
        try:
            async with asyncio.timeout(seconds):
                return await self._view.wait_for(take_or_raise)
        except TimeoutError:
            raise kind(f"{what} after {seconds:g} s: {reason(self._view.value)}") from None

    def _patience_seconds(self) -> float:
        """Return how long to wait: at first, for the keeper's own verdict on bridge and Gym."""
        seconds = self.spec.start_timeout_seconds
        return seconds if self._view.value.was_up else 2 * seconds + _FIRST_START_SLACK_SECONDS

    def _run(self) -> None:
        """Be a member until `leave`."""
        delay = _FIRST_DELAY_SECONDS
        while not self._leaving.is_set():
            problem = self._be_member()
            if self._view.value.failed is not None:
                return
            if problem is None:
                delay = _FIRST_DELAY_SECONDS
                continue
            self._view.update(lambda view, problem=problem: replace(view, problem=problem))
            self._leaving.wait(delay)
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    def _be_member(self) -> str | None:
        """Join, and return when the keeper has ended, or why it is no use to join again at once."""
        try:
            connection, state = enter(self.spec, self._join, lambda: not self._leaving.is_set())
        except (StartFailed, OSError, ValueError) as error:
            return self._fail(str(error))
        try:
            self._connect(connection)
            self._take(state)
            for state in connection.states():
                self._take(state)
        except (OSError, ValueError) as error:
            return self._fail(f"the connection to the node's keeper failed: {error}")
        finally:
            self._disconnect(connection)
        failed = self._view.value.state.failed
        self._view.update(lambda view: replace(view, state=State(), problem=failed or "the node's keeper has ended"))
        return None if failed is None else self._fail(failed)

    def _fail(self, problem: str) -> str:
        """Return `problem`; it is for good unless bridge and Gym have run before."""
        if not self._view.value.was_up:
            self._view.update(lambda view: replace(view, failed=problem))
        return problem

    def _connect(self, connection: Connection) -> None:
        with self._connection_lock:
            self._connection = connection
            if self._leaving.is_set():
                connection.leave()

    def _disconnect(self, connection: Connection) -> None:
        with self._connection_lock:
            self._connection = None
            connection.close()

    def _take(self, state: State) -> None:
        is_up = state.bridge_url is not None and (self.spec.gym is None or state.agents is not None)
        self._view.update(lambda view: replace(view, state=state, joined=True, was_up=view.was_up or is_up, problem=""))


def _has_joined(view: _View) -> bool | None:
    if view.failed is not None and not view.joined:
        raise StartFailed(view.failed)
    return view.joined or None
