"""Pauses of an engine that refuses requests in some modes of its own pause, as vLLM 0.33 does."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import cast

import pytest

from support.driven import Driven
from tokentape_sidecar.engine_controls import PauseMode, Phase
from tokentape_sidecar.weights import WeightObserver

with warnings.catch_warnings():
    # Torch's own and vLLM's, on import.
    warnings.simplefilter("ignore")
    from vllm.v1.engine.async_llm import AsyncLLM

    from tokentape_sidecar.vllm_engine.controls import VllmControls


class RefusingEngine(Driven):
    """`EngineCoreProc.pause_generation` and `pause_scheduler` of vLLM 0.33, as far as they are about requests."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=""))
        self.engine_core = self
        self.ended_by: list[str] = []
        self.cache_cleared = False
        self.reject_new_requests = False
        self.refused = False
        self.running_end = asyncio.Event()

    async def pause_scheduler_async(self, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode == "wait":
            await self.running_end.wait()
        self.ended_by += [mode] * (mode != "keep")
        self.cache_cleared |= clear_cache

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.reject_new_requests = mode != "keep"
        self.refused |= self.reject_new_requests
        await self.pause_scheduler_async(mode, clear_cache)

    async def resume_generation(self) -> None:
        self.reject_new_requests = False


def controls_of(engine: RefusingEngine) -> VllmControls:
    async def drain() -> None: ...

    llm = cast("AsyncLLM", engine)
    return VllmControls(llm, WeightObserver(llm), drain)


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("mode", PauseMode)
async def test_no_pause_has_new_requests_refused(mode: PauseMode, clear_cache: bool) -> None:
    engine = RefusingEngine()
    engine.running_end.set()
    controls = controls_of(engine)
    await controls.pause(mode, clear_cache=clear_cache)
    assert not engine.refused
    assert controls.phase is Phase.PAUSED
    assert engine.ended_by == [mode.value] * (mode is not PauseMode.KEEP)
    assert engine.cache_cleared is clear_cache


async def test_while_running_calls_finish_it_samples_and_refuses_none() -> None:
    engine = RefusingEngine()
    controls = controls_of(engine)
    pausing = asyncio.create_task(controls.pause(PauseMode.WAIT, clear_cache=True))
    await asyncio.sleep(0.05)
    assert not engine.refused
    assert controls.phase is Phase.RUNNING
    assert not engine.cache_cleared
    engine.running_end.set()
    await pausing
    assert (controls.phase, engine.cache_cleared) == (Phase.PAUSED, True)
