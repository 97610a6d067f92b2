"""An engine that the sidecar loads computes as much in a step as vLLM's own server would have it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # Torch's own and vLLM's, on import.
    warnings.simplefilter("ignore")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from tokentape_sidecar.errors import EngineNotLoaded
    from tokentape_sidecar.vllm_engine import VllmEngine

# vLLM's, of what it imports as it loads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCHED_TOKENS, SEQUENCES = 8192, 1024


async def test_batches_are_those_of_vllm_serve(monkeypatch: pytest.MonkeyPatch, model_directory: Path) -> None:
    """A CPU's are the same for all uses, so these are a GPU's; the engine's core is not started."""

    def of_a_gpu(*_: Any) -> tuple[dict[UsageContext, int], dict[UsageContext, int]]:
        return {UsageContext.OPENAI_API_SERVER: BATCHED_TOKENS}, {UsageContext.OPENAI_API_SERVER: SEQUENCES}

    monkeypatch.setattr(EngineArgs, "get_batch_defaults", of_a_gpu)

    def stop(_engine: AsyncLLM, *_: Any, vllm_config: Any, **__: Any) -> None:
        scheduler = vllm_config.scheduler_config
        raise RuntimeError(f"{scheduler.max_num_batched_tokens} tokens, {scheduler.max_num_seqs} sequences")

    monkeypatch.setattr(AsyncLLM, "__init__", stop)
    with pytest.raises(EngineNotLoaded, match=f"{BATCHED_TOKENS} tokens, {SEQUENCES} sequences"):
        await VllmEngine.load(
            model=str(model_directory), served_model_name=None, logprobs_mode="processed", loras={}, arguments=()
        )
