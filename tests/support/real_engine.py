"""A real vLLM engine on the CPU, and what lies below our adapter in it."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from support.scripted import RunningSidecar, sidecar_on
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Without the first, an engine on the CPU takes a minute to begin."""

AdapterPath = Literal["direct", "public"]
"""How the adapter reaches vLLM."""

QUESTIONS = (
    "What is 2 + 3?",
    "Name a colour.",
    "Say hello in French.",
    "Why is the sky blue?",
    "List three animals.",
    "What is the capital of Italy?",
    "Write a short poem.",
    "Count to five.",
)

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


class RealEngine:
    """An engine, what its core emitted since it was loaded, and the same model in transformers."""

    def __init__(self, llm: AsyncLLM, model_directory: Path) -> None:
        import torch  # noqa: PLC0415 - seconds
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        self.llm = llm
        self.emitted = record_emitted(llm)
        loader: Any = AutoModelForCausalLM
        tokenizers: Any = AutoTokenizer
        self._model = loader.from_pretrained(str(model_directory), dtype=torch.bfloat16)
        self.tokenizer = tokenizers.from_pretrained(str(model_directory))

    def prompt(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def logits(self, token_ids: Sequence[int]) -> Any:
        """The float32 logits that predict each of `token_ids` but the first: one row less than tokens."""
        import torch  # noqa: PLC0415

        with torch.no_grad():
            return self._model(torch.tensor([list(token_ids)])).logits[0, :-1].float()


@asynccontextmanager
async def sidecar(
    engine: RealEngine,
    path: AdapterPath = "direct",
    *,
    stall_limit_seconds: float = DEFAULT_STALL_LIMIT_SECONDS,
) -> AsyncGenerator[RunningSidecar]:
    """Run a sidecar attached to the engine; in the end the engine may have nothing left to do."""
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - imports vLLM

    attached = VllmEngine.attach(engine.llm, path=path)
    async with sidecar_on(attached, stall_limit_seconds=stall_limit_seconds) as running:
        yield running
    assert engine.llm.output_processor.get_num_unfinished_requests() == 0


def differences(expected: Any, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """How far each log-probability lies from its own in `expected`, rows of a log-softmax."""
    return [
        abs(row[token_id].item() - value) for row, token_id, value in zip(expected, token_ids, logprobs, strict=True)
    ]
