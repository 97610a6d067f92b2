"""Kills, at random moments that a seed fixes, of what serves rollouts; what came of them, and what is left."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from support.marked import Marked
from support.mortal_services import FollowedTapes
from support.nodes import is_alive, words_of
from support.roles import ROLES, is_a
from support.waiting import eventually
from tokentape_executor.rollout import FailedRollout, Rollout

_logger = logging.getLogger(__name__)

_WHILE_RESTARTING = 0.3
"""The part of kills that does not wait until rollouts sample again."""
_AGAIN_SECONDS = 90.0
"""How long it may take after a kill until rollouts sample again."""


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One kill to come."""

    victim: str
    seconds: float
    """How long before it the victim has been running, and rollouts have been sampling."""
    while_restarting: bool
    """Whether it comes although rollouts do not sample again yet: what was killed before is still starting."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: when, of which process, and how many calls were sampling."""

    planned: PlannedKill
    seconds: float
    pid: int
    calls: int


@dataclass
class Chaos:
    """A killer of what has the mark."""

    marked: Marked
    tapes: FollowedTapes
    plan: Sequence[PlannedKill]
    random: random.Random
    kills: list[Kill] = field(default_factory=list[Kill])
    ports: set[int] = field(default_factory=set[int])
    """Where victims have listened."""
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def planned(
        cls, seed: int, marked: Marked, tapes: FollowedTapes, victims: Mapping[str, int], seconds: float
    ) -> Chaos:
        """Plan to kill each of the victims so often, each after `seconds` at most."""
        generator = random.Random(seed)
        names = [name for name, count in victims.items() for _ in range(count)]
        generator.shuffle(names)
        plan = [
            PlannedKill(name, generator.uniform(0.05, seconds), index > 0 and generator.random() < _WHILE_RESTARTING)
            for index, name in enumerate(names)
        ]
        return cls(marked, tapes, plan, generator)

    @asynccontextmanager
    async def reigns(self) -> AsyncGenerator[None]:
        """Kill what is planned while the block runs. Raises what went wrong with that."""
        killing = asyncio.create_task(self._run())
        try:
            yield
        finally:
            killing.cancel()
            await asyncio.wait({killing})
        if not killing.cancelled():
            killing.result()

    async def _run(self) -> None:
        for planned in self.plan:
            while not await self._kill(planned):
                pass

    async def _kill(self, planned: PlannedKill) -> bool:
        """Kill the victim at its moment; return whether it was there to be killed."""
        await self._until_sampling(planned)
        victims = await self._victims(planned.victim)
        await asyncio.sleep(planned.seconds)
        await self._until_sampling(planned)
        victim = self.random.choice(victims)
        kill = Kill(planned, round(time.monotonic() - self.began, 1), victim.pid, len(self.tapes.sampling))
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            # It has ended with what was killed before.
            return False
        self.kills.append(kill)
        self.tapes.note_kill()
        # Among the warnings that rollouts give, for whoever reads that a test has failed.
        _logger.warning("%s", kill)
        return True

    async def _until_sampling(self, planned: PlannedKill) -> None:
        await eventually(lambda: planned.while_restarting or self.tapes.sampling, seconds=_AGAIN_SECONDS)

    async def _victims(self, name: str) -> list[psutil.Process]:
        """The processes of this kind, when there are some; notes on the way where all listen."""
        async with asyncio.timeout(_AGAIN_SECONDS):
            while True:
                processes = await asyncio.to_thread(self.marked.processes)
                ours = [process for process in processes if any(_is_a(role, process) for role in ROLES)]
                self.ports |= {port for process in ours for port in _ports_of(process)}
                if found := [process for process in ours if _is_a(name, process)]:
                    return sorted(found, key=lambda process: process.pid)
                await asyncio.sleep(0.2)

    def report(self, results: Sequence[Rollout | FailedRollout]) -> None:
        """Log figures."""
        histogram = sorted(Counter(result.attempts for result in results).items())
        seconds = time.monotonic() - self.began
        _logger.warning("%d tapes in %.1f s; attempts: %s", len(self.tapes.opened), seconds, dict(histogram))


def _is_a(name: str, process: psutil.Process) -> bool:
    return is_a(name, words_of(process)) and is_alive(process)


def _ports_of(process: psutil.Process) -> set[int]:
    try:
        return listeners(process.net_connections("tcp"))
    except psutil.Error:
        return set()


def listeners(connections: Iterable[Any]) -> set[int]:
    """The ports of those connections, as psutil gives them, that listen."""
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def check_nothing_left(chaos: Chaos) -> None:
    """No process runs any more, and nobody listens where they did."""
    left = chaos.marked.processes()
    psutil.wait_procs(left, timeout=5)
    assert [process.cmdline() for process in left if is_alive(process)] == []
    assert chaos.ports
    assert listeners(psutil.net_connections("tcp")).isdisjoint(chaos.ports)


def check_attempts(chaos: Chaos, results: Sequence[Rollout | FailedRollout], count: int) -> None:
    """All rollouts succeeded, some of them after a kill, and none lost more attempts than there were kills."""
    assert [result for result in results if not isinstance(result, Rollout)] == []
    assert len(results) == len({result.tape_id for result in results if isinstance(result, Rollout)}) == count
    assert len(chaos.kills) == len(chaos.plan)
    assert all(kill.calls > 0 for kill in chaos.kills if not kill.planned.while_restarting)
    assert 1 < max(result.attempts for result in results) <= 1 + len(chaos.kills)
