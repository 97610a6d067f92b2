"""The keeper's side of the connections with its members."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from tokentape_executor.node.messages import Join, State, parse

_logger = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0
"""How long a connection may say nothing."""
_TELL_SECONDS = 0.5
"""How long a member that is told for the last time may take to read."""


class _Member:
    """One member's connection."""

    def __init__(self, join: Join, writer: asyncio.StreamWriter) -> None:
        self.sidecars = join.sidecars
        self._writer = writer
        self._changed = asyncio.Event()

    async def tell_now(self, state: State) -> None:
        """Send `state`, if the member reads."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                self._writer.write(state.line())
                await self._writer.drain()

    def tell(self) -> None:
        """Make `send_states` send the state, which has changed."""
        self._changed.set()

    async def send_states(self, current: Callable[[], State]) -> None:
        """Send the state as it is, and after each change as it is then, until cancelled or the member is gone."""
        with contextlib.suppress(ConnectionError):
            while True:
                self._changed.clear()
                self._writer.write(current().line())
                await self._writer.drain()
                await self._changed.wait()


class Membership:
    """Who is there, and what all of them are told."""

    def __init__(self, publish_table: Callable[[Mapping[str, str]], None]) -> None:
        """`publish_table` gets all members' sidecars, name to address, whenever they have changed."""
        self.had_any = False
        """Whether a member has ever joined."""
        self.sidecars: Mapping[str, str] = {}
        """All members' sidecars."""
        self.state = State()
        self.sidecars_changed = asyncio.Event()
        """Set at every change of the members' sidecars, and of the bridge."""
        self._publish_table = publish_table
        self._members: set[_Member] = set()
        self._joined = asyncio.Event()
        """Set, and replaced, when a member joins."""

    @property
    def any(self) -> bool:
        """Whether a member is there."""
        return bool(self._members)

    def update(self, **changes: Any) -> None:
        """Change the state, and tell every member."""
        self.state = State.model_validate(self.state.model_copy(update=changes).model_dump())
        for member in self._members:
            member.tell()

    def fail(self, problem: str) -> None:
        """Tell every member, and all that come yet, that there is nothing to be had."""
        if self.state.failed is None:
            _logger.error("%s", problem)
            self.update(failed=problem)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end. That of the last member ends when another joins, or this process does."""
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError):
            pass
        except ValueError as error:
            _logger.warning("a connection said nothing that a member says: %.200s", error)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_JOIN_SECONDS):
            line = await reader.readline()
        if not line:
            return
        join = parse(Join, line)
        if problem := self._conflict(join):
            writer.write(State(refused=problem).line())
            await writer.drain()
            return
        member = _Member(join, writer)
        self._enter(member)
        telling = asyncio.create_task(member.send_states(lambda: self.state))
        try:
            # Returns when the member closes its side, by itself or by dying.
            await reader.read()
        finally:
            self._leave(member)
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        if not self._members:
            await self._joined.wait()

    def _conflict(self, join: Join) -> str | None:
        for name, address in join.sidecars.items():
            if self.sidecars.get(name, address) != address:
                return (
                    f"a sidecar named {name!r} is in this node's group already, at {self.sidecars[name]} and not at "
                    f"{address}; give sidecars of one group different names"
                )
        return None

    def _enter(self, member: _Member) -> None:
        self.had_any = True
        self._members.add(member)
        self._joined.set()
        self._joined = asyncio.Event()
        self._update_table()

    def _leave(self, member: _Member) -> None:
        self._members.discard(member)
        self._update_table()

    def _update_table(self) -> None:
        self.sidecars = {name: where for member in self._members for name, where in member.sidecars.items()}
        self._publish_table(self.sidecars)
        self.update(served=tuple(name for name in self.state.served if name in self.sidecars))
        self.sidecars_changed.set()

    async def tell_all(self) -> None:
        """Return when every member that reads has been told the state."""
        await asyncio.gather(*(member.tell_now(self.state) for member in self._members))
