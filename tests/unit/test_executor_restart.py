"""An executor that is shut down, while it starts or later, and then used again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] # it ships none
import pytest

from tokentape_executor import openrlhf
from tokentape_executor.errors import PolicyUnavailable, StartFailed
from tokentape_executor.openrlhf import AgentExecutor
from tokentape_executor.settings import ExecutorSettings

Wait = Callable[[], Awaitable[Any]]

SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, max_tokens=8)
TOKENIZER = SimpleNamespace(chat_template=None, added_tokens_decoder={}, bos_token=None, eos_token=None)


class Member:
    """Something to leave."""

    def __init__(self) -> None:
        self.leavings = 0

    def leave(self) -> None:
        self.leavings += 1


class Quick(AgentExecutor):
    """Joins a `Member` in place of a node, after `starting`; `execute` returns which it was, after `rolling`."""

    def __init__(
        self, starting: Callable[[], Awaitable[Any]], rolling: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        super().__init__(ExecutorSettings())
        self.starting = starting
        self.rolling = rolling
        self.members: list[Member] = []
        self.closed: list[int] = []

    async def _start(self, services: Any, llm_engine: Any, hf_tokenizer: Any) -> None:
        del llm_engine, hf_tokenizer
        self.members.append(Member())
        services.on_loop.callback(self.closed.append, len(self.members))
        services.join(self.members[-1])
        await self.starting()
        services.rollouts = self

    async def rollout(self, *_: Any, **__: Any) -> int:
        if self.rolling is not None:
            await self.rolling()
        return len(self.members)


@pytest.fixture(autouse=True)
def plain_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(rollout: Any, **_: Any) -> Any:
        return rollout

    monkeypatch.setattr(openrlhf, "openrlhf_result", result)


async def at_once() -> None:
    await asyncio.sleep(0)


async def execute(executor: AgentExecutor) -> int:
    return cast("int", await executor.execute("?", "5", SAMPLING, 64, TOKENIZER, None))


async def many(executor: AgentExecutor) -> list[int]:
    return await asyncio.gather(*(execute(executor) for _ in range(3)))


def leavings(executor: Quick) -> list[int]:
    return [member.leavings for member in executor.members]


def test_after_shutdown_an_executor_serves_another_event_loop() -> None:
    executor = Quick(lambda: asyncio.sleep(0.02))
    assert asyncio.run(many(executor)) == [1, 1, 1]
    with pytest.raises(StartFailed, match="another event loop"):
        asyncio.run(many(executor))
    executor.shutdown()
    assert asyncio.run(many(executor)) == [2, 2, 2]
    executor.shutdown()
    assert leavings(executor) == [1, 1]


@pytest.mark.parametrize("in_thread", [False, True])
async def test_shutdown_during_a_start_fails_it_and_the_next_caller_starts_anew(*, in_thread: bool) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def starting() -> None:
        begun.set()
        await go_on.wait()

    executor = Quick(starting)
    first = [asyncio.create_task(execute(executor)) for _ in range(2)]
    await begun.wait()
    if in_thread:
        await asyncio.to_thread(executor.shutdown)
    else:
        executor.shutdown()
    assert leavings(executor) == [1]
    go_on.set()
    results = await asyncio.gather(*first, return_exceptions=True)
    # Those who waited for it, too; who comes later starts anew.
    assert [type(result) for result in results] == [StartFailed] * 2
    assert "shut down while it started" in str(results[0])
    assert await execute(executor) == 2
    await asyncio.to_thread(executor.shutdown)
    assert (leavings(executor), executor.closed) == ([1, 1], [1, 2])


async def test_a_start_whose_caller_is_cancelled_leaves_nothing_and_the_next_starts_anew() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def starting() -> None:
        begun.set()
        await go_on.wait()

    executor = Quick(starting)
    first = asyncio.create_task(execute(executor))
    await begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (leavings(executor), executor.closed) == ([1], [1])
    go_on.set()
    assert await execute(executor) == 2
    await asyncio.to_thread(executor.shutdown)


async def test_shutdown_ends_rollouts_that_run() -> None:
    ended: list[str] = []

    async def rolling() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)  # as sealing a tape takes
            ended.append("sealed")

    executor = Quick(at_once, rolling)
    rollouts = [asyncio.create_task(execute(executor)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(executor.shutdown)
    # By then all has ended, and what they need was there for as long.
    assert (ended, executor.closed) == (["sealed"] * 3, [1])
    results = await asyncio.gather(*rollouts, return_exceptions=True)
    assert [type(result) for result in results] == [PolicyUnavailable] * 3


async def test_cancelling_a_rollout_is_no_shutdown() -> None:
    executor = Quick(at_once, lambda: asyncio.sleep(60))
    rollout = asyncio.create_task(execute(executor))
    await asyncio.sleep(0.05)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert leavings(executor) == [0]
    executor.rolling = None
    assert await execute(executor) == 1
    await asyncio.to_thread(executor.shutdown)


async def test_an_executor_that_is_forgotten_leaves_its_node() -> None:
    executor = Quick(at_once)
    await execute(executor)
    members, gone = executor.members, weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    assert [member.leavings for member in members] == [1]


async def test_each_restart_leaves_no_finalizer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.finalize[..., Any]] = []

    def finalize(owner: object, function: Callable[[], None]) -> weakref.finalize[..., Any]:
        made.append(_finalize(owner, function))
        return made[-1]

    _finalize = weakref.finalize
    monkeypatch.setattr(weakref, "finalize", finalize)
    executor = Quick(at_once)
    for _ in range(2):
        await execute(executor)
        assert made[-1].alive
        executor.shutdown()
    assert [each.alive for each in made] == [False, False]


async def test_e14_a_copy_of_an_executor_in_use_holds_nothing_of_it() -> None:
    executor = Quick(at_once)
    await execute(executor)
    twin = cloudpickle.loads(cloudpickle.dumps(executor))
    twin.shutdown()
    assert leavings(executor) == [0]
    # Its own lists went with it: it starts for the second time.
    assert await execute(twin) == 2
    assert await execute(executor) == 1
    twin.shutdown()
    executor.shutdown()
    assert (leavings(twin), leavings(executor)) == ([0, 1], [1])
