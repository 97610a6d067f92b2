"""vLLM's own controls behind the engine port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from typing_extensions import override
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tokentape_sidecar.driven_controls import DrivenControls
from tokentape_sidecar.engine_controls import PauseMode
from tokentape_sidecar.errors import EngineDead, InvalidArgument, NotFound, Unsupported
from tokentape_sidecar.vllm_engine.versions import NAMES_WEIGHTS
from tokentape_sidecar.vllm_engine.worker import WeightsExtension
from tokentape_sidecar.weights import WeightObserver

_T = TypeVar("_T")

EXTENSION = f"{WeightsExtension.__module__}.{WeightsExtension.__qualname__}"
"""What vLLM's option `worker_extension_cls` is to be for an engine whose failed updates can be mended."""

_UNNAMED = "default"


class VllmControls(DrivenControls):
    """Drives an `AsyncLLM`."""

    def __init__(self, engine: AsyncLLM, observer: WeightObserver, drain: Callable[[], Awaitable[None]]) -> None:
        """`drain` returns when all that the core has sent is in the records."""
        super().__init__(engine, observer)
        self._llm = engine
        self._drain = drain
        if engine.vllm_config.parallel_config.worker_extension_cls == EXTENSION:
            self.reload_method = WeightsExtension.tokentape_reload_weights.__name__

    @override
    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling."""
        if mode is not PauseMode.KEEP:
            # Running requests end first, as asked, while new ones are held: `pause_generation` may refuse them.
            await self._ask(self._llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=False))
        await super().pause(PauseMode.KEEP, clear_cache=clear_cache)
        await self._ask(self._drain())

    @override
    async def check_checkpoint(self, directory: Path) -> None:
        """Raise `NotFound` where there are no safetensors files, or one of them is not whole."""
        await super().check_checkpoint(directory)
        await asyncio.to_thread(_check_safetensors, directory)

    @override
    def check_weight_version(self, version: str) -> None:
        """Raise `InvalidArgument` for vLLM's name of weights that nobody has named."""
        if version == _UNNAMED:
            raise InvalidArgument("weight_version", f"{version!r} is what vLLM calls weights that nobody has named")

    @override
    async def set_weight_version(self, version: str) -> None:
        """Name the present weights."""
        if NAMES_WEIGHTS:
            await self._ask(self._llm.update_weight_version(version))
        else:
            await super().set_weight_version(version)

    @override
    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Release memory. Raises `Unsupported` where vLLM's sleep mode is off; on a CPU it has none."""
        if not self._llm.vllm_config.model_config.enable_sleep_mode:
            raise Unsupported("vLLM's sleep mode is off: start it with --enable-sleep-mode, on a device that has it")
        await super().sleep(level, mode)

    @override
    async def _ask(self, answer: Awaitable[_T]) -> _T:
        try:
            return await answer
        except EngineDeadError:
            raise EngineDead("the engine is dead") from None


def _check_shards(directory: Path) -> None:
    for index in directory.glob("*.safetensors.index.json"):
        try:
            shards = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, LookupError, AttributeError, TypeError):
            raise NotFound(f"directory: {index.name} is no index of shards") from None
        lacking = sorted(name for name in shards if not (directory / name).is_file())
        if lacking:
            raise NotFound(f"directory: of the {len(shards)} files in {index.name}, {lacking[0]} is not there")


def _check_safetensors(directory: Path) -> None:
    # vLLM would fall back to pickled files, and those are code.
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise NotFound("directory: there are no *.safetensors files in it")
    _check_shards(directory)
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                # Opened, its header was read, and compared with its length.
                pass
        except (SafetensorError, OSError) as error:
            raise NotFound(f"directory: {file.name} is not a whole safetensors file: {error}") from None
