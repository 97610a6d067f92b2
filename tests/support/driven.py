"""An engine object as a trainer drives it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokentape_sidecar.weights import WeightObserver


class Driven:
    """What a trainer drives: the engine's control methods, which here do nothing else."""

    __slots__ = ("__dict__", "blocks_in_use", "workers_answer")

    def __init__(self) -> None:
        self.blocks_in_use = False
        self.workers_answer = asyncio.Event()
        self.workers_answer.set()

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> str:
        del args, kwargs
        await self.workers_answer.wait()
        if method == "update_weights_badly":
            raise RuntimeError(method)
        return method

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None: ...
    async def resume_generation(self) -> None: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return tags is None or "kv_cache" in tags

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return reset_running_requests or not self.blocks_in_use


@pytest.fixture
def driven() -> Driven:
    return Driven()


@pytest.fixture
def observer(driven: Driven) -> WeightObserver:
    return WeightObserver(driven)
