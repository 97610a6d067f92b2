"""An executor that is shut down, while it starts or later, and then used again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokentape_executor import openrlhf
from tokentape_executor.errors import StartFailed
from tokentape_executor.openrlhf import AgentExecutor
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import ExecutorSettings

SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, max_tokens=8)


class Member:
    """Something to stop."""

    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


class Quick(AgentExecutor):
    """Starts a `Member` in place of the three services, after `starting`; `execute` returns which it was."""

    def __init__(self, starting: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(ExecutorSettings())
        self.starting = starting
        self.members: list[Member] = []

    async def _start(self, services: Any, llm_engine: Any, hf_tokenizer: Any) -> None:
        del llm_engine, hf_tokenizer
        self.members.append(Member())
        services.group.add(self.members[-1])
        await self.starting()
        services.rollouts = self

    async def rollout(self, *_: Any, **__: Any) -> int:
        return len(self.members)


@pytest.fixture(autouse=True)
def plain_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(rollout: Any, **_: Any) -> Any:
        return rollout

    monkeypatch.setattr(openrlhf, "openrlhf_result", result)


async def execute(executor: AgentExecutor) -> int:
    return cast("int", await executor.execute("?", "5", SAMPLING, 64, None, None))


async def many(executor: AgentExecutor) -> list[int]:
    return await asyncio.gather(*(execute(executor) for _ in range(3)))


def test_after_shutdown_an_executor_serves_another_event_loop() -> None:
    executor = Quick(lambda: asyncio.sleep(0.02))
    assert asyncio.run(many(executor)) == [1, 1, 1]
    with pytest.raises(StartFailed, match="another event loop"):
        asyncio.run(many(executor))
    executor.shutdown()
    assert asyncio.run(many(executor)) == [2, 2, 2]
    executor.shutdown()
    assert [member.stops for member in executor.members] == [1, 1]


async def test_shutdown_during_a_start_fails_it_and_the_next_caller_starts_anew() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def starting() -> None:
        begun.set()
        await go_on.wait()

    executor = Quick(starting)
    first = asyncio.create_task(execute(executor))
    await begun.wait()
    executor.shutdown()
    # On the same loop: it waits until the first start has ended.
    second = asyncio.create_task(execute(executor))
    await asyncio.sleep(0.01)
    assert len(executor.members) == 1
    go_on.set()
    with pytest.raises(StartFailed, match="shut down while it started"):
        await first
    assert await second == 2
    executor.shutdown()
    assert [member.stops for member in executor.members] == [1, 1]


async def test_each_restart_leaves_no_finalizer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.finalize[..., Any]] = []

    def finalize(owner: object, function: Callable[[], None]) -> weakref.finalize[..., Any]:
        made.append(_finalize(owner, function))
        return made[-1]

    _finalize = weakref.finalize
    monkeypatch.setattr(weakref, "finalize", finalize)
    executor = Quick(lambda: asyncio.sleep(0))
    for _ in range(2):
        await execute(executor)
        assert made[-1].alive
        executor.shutdown()
    assert [each.alive for each in made] == [False, False]


def test_what_joins_a_stopped_group_is_stopped() -> None:
    group = ServiceGroup(None)
    early, late = Member(), Member()
    group.add(early)
    group.stop()
    with pytest.raises(StartFailed, match="shut down while it started"):
        group.add(late)
    group.stop()
    assert (early.stops, late.stops) == (1, 1)
