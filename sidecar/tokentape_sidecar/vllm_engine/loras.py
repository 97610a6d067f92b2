"""LoRA adapters from directories in PEFT's format: found to be there before vLLM loads, then given to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from tokentape_sidecar.errors import EngineNotLoaded


def lora_defaults(loras: Mapping[str, Path]) -> Mapping[str, object]:
    """Return vLLM's options for adapters of these directories, by name; options that are given go before.

    Raises `EngineNotLoaded` for a directory that holds no adapter, or one of too large a rank.
    """
    if not loras:
        return {}
    needed = max(_rank(name, directory) for name, directory in loras.items())
    ranks = sorted(get_args(MaxLoRARanks))
    rank = next((rank for rank in ranks if rank >= needed), None)
    if rank is None:
        raise EngineNotLoaded(f"--lora: an adapter has rank {needed}; vLLM serves at most {ranks[-1]}")
    return {"enable_lora": True, "max_loras": _slots(len(loras)), "max_lora_rank": rank}


def check_slots(max_loras: int, loras: int) -> None:
    """Raise `EngineNotLoaded` for an engine whose `max_loras` would have its adapters spoil the base model's calls."""
    if loras and current_platform.is_cpu() and max_loras < _slots(loras):
        raise EngineNotLoaded(
            f"--max-loras: {loras} adapters need {_slots(loras)} on a CPU, not {max_loras}: vLLM's kernels there use "
            "the last slot's adapter for calls of the base model, unless that slot is empty"
        )


def _slots(loras: int) -> int:
    """Return how many slots this many adapters need, all in place at once.

    vLLM marks a token of the base model with slot -1, which its CPU kernels take for the last one; an empty slot is all
    zeros.
    """
    return loras + 1 if current_platform.is_cpu() else loras


def check_names(loras: Mapping[str, Path], model_name: str) -> None:
    """Raise `EngineNotLoaded` for an adapter that has the model's name: clients could not name both."""
    if model_name in loras:
        raise EngineNotLoaded(f"--lora: {model_name!r} is the model's own name; give another, or --served-model-name")


def to_requests(loras: Mapping[str, Path]) -> list[LoRARequest]:
    """Return the adapters as vLLM takes them, with ids of their own."""
    return [LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(loras.items(), 1)]


async def add_all(engine: AsyncLLM, loras: Sequence[LoRARequest]) -> None:
    """Load every adapter into `engine`, an own one. Raises `EngineNotLoaded`, the engine shut down, where one fails."""
    for lora in loras:
        try:
            await engine.add_lora(lora)
        except Exception as error:
            await asyncio.to_thread(engine.shutdown)
            raise EngineNotLoaded(
                f"--lora: vLLM could not load {lora.lora_name} from {lora.lora_path}: {error}"
            ) from error


def _rank(name: str, directory: Path) -> int:
    """Return the largest rank that an adapter has in any module."""
    try:
        config = PEFTHelper.from_local_dir(str(directory), None)
        return max([config.r, *config.rank_pattern.values()])
    except OSError as error:
        raise EngineNotLoaded(f"--lora: {name}: cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise EngineNotLoaded(f"--lora: {name}: {directory}/adapter_config.json is not PEFT's: {error}") from None
