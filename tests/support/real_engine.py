"""A real vLLM engine on the CPU, and what lies below our adapter in it."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Without the first, an engine on the CPU takes a minute to begin."""

Emitted = dict[str, list[int]]
"""vLLM's request id to the ids that its core emitted. A request's id contains that of the call that it serves."""


def load_engine(
    model_directory: Path,
    *,
    max_model_len: int = 1024,
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs",
) -> AsyncLLM:
    """Load an engine as a trainer does, in this process; end it by `shut_down`."""
    os.environ |= CPU_ENVIRONMENT
    from vllm import AsyncEngineArgs  # noqa: PLC0415 - reads the environment
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model_directory),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=max_model_len,
            logprobs_mode=logprobs_mode,
        )
    )


async def shut_down(engine: AsyncLLM) -> None:
    """Shut an engine down, once: its destructor would do so again when parts of Python are gone already."""
    await asyncio.to_thread(engine.shutdown)
    engine.shutdown = lambda timeout=None: None


def record_emitted(engine: AsyncLLM) -> Emitted:
    """Note every id that the engine's core emits, before anything of ours sees it."""
    emitted: Emitted = defaultdict(list)
    get_output = engine.engine_core.get_output_async

    async def recording() -> Any:
        outputs = await get_output()
        for output in outputs.outputs:
            emitted[output.request_id].extend(output.new_token_ids)
        return outputs

    engine.engine_core.get_output_async = recording
    return emitted


def requests_of(emitted: Emitted, call_id: str) -> dict[str, list[int]]:
    """What the engine's core emitted for a call, by request: one per choice."""
    return {request_id: token_ids for request_id, token_ids in emitted.items() if call_id in request_id}
