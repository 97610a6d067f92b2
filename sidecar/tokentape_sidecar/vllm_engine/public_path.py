"""The public path: vLLM's own stream of deltas, one task per call.

It works with any vLLM that has `AsyncLLM.add_request`, and costs an output object and a task switch per step. vLLM
stamps nothing on a delta, so versions are the numbers of updates that were seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from vllm import SamplingParams
from vllm.inputs import TokensInput
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from tokentape_sidecar.call_weights import CallWeights
from tokentape_sidecar.engine import EngineCall, FinishReason, Sink, TopLogprobs
from tokentape_sidecar.errors import CallError
from tokentape_sidecar.vllm_engine.request_errors import fail_call
from tokentape_sidecar.weights import WeightObserver


class PublicPath:
    """Moves deltas from vLLM's collectors to records."""

    def __init__(self, engine: AsyncLLM, observer: WeightObserver) -> None:
        self._engine = engine
        self._observer = observer
        self._pumps: set[asyncio.Task[None]] = set()

    async def submit(
        self, call: EngineCall, prompt: TokensInput, params: SamplingParams, sink: Sink, lora: LoRARequest | None
    ) -> None:
        """Start a request; vLLM's own errors pass through."""
        collector = await self._engine.add_request(
            call.call_id,
            prompt,
            params,
            lora_request=lora,
            priority=call.priority,
            trace_headers=call.trace_headers or None,
        )
        pump = asyncio.create_task(_pump(collector, sink, call, CallWeights(self._observer)))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def abort(self, call_id: str) -> None:
        """End a call by vLLM's own abort; what the core had on its way is lost."""
        await self._engine.abort(call_id)

    async def drain(self) -> None:
        """Return at once: vLLM's own pause has waited a moment for what was on its way."""

    async def close(self) -> None:
        """Stop moving; the calls have ended by now."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


async def _pump(collector: RequestOutputCollector, sink: Sink, call: EngineCall, weights: CallWeights) -> None:
    """Move a request's deltas to its record until it has ended."""
    finished = False
    try:
        while not finished:
            output = cast("RequestOutput", collector.get_nowait() or await collector.get())
            finished = output.finished
            # vLLM gives them with the first output, and an empty list with every later one.
            if output.prompt_logprobs:
                prompt = cast("FlatLogprobs", output.prompt_logprobs)
                sink.take_prompt_logprobs(
                    *_columns(prompt, call.prompt_token_ids, call.sampling.prompt_logprobs or 0, first=1)
                )
            for completion in output.outputs:
                _take(completion, sink, call.sampling.top_logprobs or 0, weights)
    except Exception as error:  # noqa: BLE001 - logged there, where it is unexpected
        fail_call(sink, call.call_id, error)
    finally:
        collector.close()


def _take(completion: CompletionOutput, sink: Sink, k: int, weights: CallWeights) -> None:
    token_ids = completion.token_ids
    if token_ids:
        if completion.logprobs is None:
            sink.fail(CallError("vLLM gave no log-probabilities for sampled tokens"))
            return
        logprobs, top = _columns(cast("FlatLogprobs", completion.logprobs), token_ids, k)
        sink.append(completion.index, token_ids, logprobs, weights=weights.of_step(None), top_logprobs=top)
    if completion.finish_reason is None:
        return
    if completion.finish_reason == "error":
        sink.fail(CallError("vLLM ended this call with an error"))
    else:
        sink.finish(completion.index, FinishReason(completion.finish_reason), completion.stop_reason)


def _columns(
    flat: FlatLogprobs, token_ids: Sequence[int], k: int, *, first: int = 0
) -> tuple[list[float], TopLogprobs | None]:
    """Return the log-probability of each of `token_ids[first:]`, and the `k` most probable tokens at each position.

    At each position vLLM lists the given token first, then the most probable ones. Raises `CallError` where the first
    is another token.
    """
    own: list[float] = []
    top_ids: list[int] = []
    top_values: list[float] = []
    for position in range(first, len(token_ids)):
        start = flat.start_indices[position]
        if flat.token_ids[start] != token_ids[position]:
            raise CallError("vLLM's log-probabilities belong to other tokens than those sampled")
        own.append(flat.logprobs[start])
        top_ids.extend(flat.token_ids[start + 1 : start + 1 + k])
        top_values.extend(flat.logprobs[start + 1 : start + 1 + k])
    return own, TopLogprobs(k, top_ids, top_values) if k else None
