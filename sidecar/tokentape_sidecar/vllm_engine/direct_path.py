"""The direct path: each engine step goes from vLLM's output handler straight to the record.

vLLM keeps one `RequestState` per request and calls it for every step. This path registers states of its own class, so
that vLLM's handler, statistics, aborts and its count of unfinished requests stay as they are, while no output object,
no queue and no task is made. What is used beyond vLLM's public interface, all of it here:

- `AsyncLLM`: `input_processor`, `output_processor`, `engine_core` (and its `outputs_queue`), `_run_output_handler`, and
  what `versions` uses;
- `OutputProcessor`: `request_states`, `external_req_ids`, and what it calls on a state: `track_weight_version`,
  `logprobs_processor.update_from_output`, `make_request_output`, `queue.put`;
- `LogprobsLists`: the sampled token in column 0, the most probable ones after it;
- what `step_decoder` uses.

`versions` says for which releases this was verified; others take the public path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from copy import copy
from typing import Any, cast

from typing_extensions import override
from vllm import SamplingParams, envs
from vllm.inputs import TokensInput
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from tokentape_sidecar.call_weights import CallWeights
from tokentape_sidecar.engine import EngineCall, FinishReason, Sink, TopLogprobs
from tokentape_sidecar.errors import CallError
from tokentape_sidecar.vllm_engine.request_errors import fail_call
from tokentape_sidecar.vllm_engine.step_decoder import StepDecoder
from tokentape_sidecar.vllm_engine.versions import check_admission
from tokentape_sidecar.weights import WeightObserver

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 2.0


class DirectPath:
    """Registers calls in vLLM's output processor."""

    def __init__(self, engine: AsyncLLM, observer: WeightObserver) -> None:
        self._engine = engine
        self._observer = observer
        core = cast("object", engine.engine_core)
        self._decoder = (
            StepDecoder(core.decoder, engine.output_processor.request_states, _ChoiceState)
            if isinstance(core, AsyncMPClient)
            else None
        )

    async def submit(
        self, call: EngineCall, prompt: TokensInput, params: SamplingParams, sink: Sink, lora: LoRARequest | None
    ) -> None:
        """Start a request for each choice; vLLM's own errors pass through."""
        engine = self._engine
        if engine.errored:
            raise EngineDeadError
        tasks = await engine.get_supported_tasks()
        request = engine.input_processor.process_inputs(
            call.call_id,
            prompt,
            params,
            supported_tasks=tasks,
            lora_request=lora,
            priority=call.priority,
            trace_headers=call.trace_headers or None,
        )
        if engine.errored:
            # It died meanwhile, and has told those that were registered.
            raise EngineDeadError
        engine.input_processor.assign_request_id(request)
        engine._run_output_handler()  # pyright: ignore[reportPrivateUsage] - see the module
        check_admission(engine, params.n, request.request_id)
        requests = _one_per_choice(request)
        for choice, one in enumerate(requests):
            self._register(one, choice, call, sink)
        try:
            for one in requests:
                # An abort may come between two of them, and the core must not get the rest.
                if one.request_id in engine.output_processor.request_states:
                    await engine.engine_core.add_request_async(one)
        except BaseException:
            await engine.abort(call.call_id)
            raise

    async def abort(self, call_id: str) -> None:
        """End a call's requests at the core, take what it sampled until then, and close them in the front end.

        vLLM's own abort closes them in the front end first, and loses the steps that are on their way.
        """
        request_ids = list(self._engine.output_processor.external_req_ids.get(call_id, ()))
        if not request_ids:
            return
        await self._engine.engine_core.abort_requests_async(request_ids)
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self.drain()
        except TimeoutError:
            logger.warning("the engine core is silent; call %s ends with what came until now", call_id)
        except EngineDeadError:
            pass
        await self._engine.abort(call_id)

    async def drain(self) -> None:
        """Return when vLLM's handler has processed all that the core sent before it answered here."""
        await self._engine.is_paused()
        core, states = self._engine.engine_core, self._engine.output_processor.request_states
        assert isinstance(core, AsyncMPClient)
        while not core.outputs_queue.empty():  # noqa: ASYNC110 - the queue is the handler's, and tells nobody
            await asyncio.sleep(0)
        # The handler gives way between chunks of a large step.
        for _ in range(len(states) // envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE + 2):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Let vLLM decode by itself again; what runs here is its own handler."""
        if self._decoder is not None:
            self._decoder.close()

    def _register(self, request: EngineCoreRequest, choice: int, call: EngineCall, sink: Sink) -> None:
        processor = self._engine.output_processor
        state = _ChoiceState.from_new_request(
            tokenizer=processor.tokenizer,
            request=request,
            prompt=None,
            parent_req=None,
            request_index=choice,
            queue=cast("RequestOutputCollector", _Errors(sink, call.call_id)),
            log_stats=processor.log_stats,
            stream_interval=1,
        )
        assert isinstance(state, _ChoiceState)
        state.bind(CallWeights(self._observer), call, sink)
        processor.request_states[request.request_id] = state
        processor.external_req_ids[state.external_req_id].append(request.request_id)


def _one_per_choice(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return a request per choice, named and seeded as vLLM itself does it for `n` above 1."""
    assert request.sampling_params is not None
    n = request.sampling_params.n
    if n == 1:
        return [request]
    parent = ParentRequest(request)
    requests: list[EngineCoreRequest] = []
    for choice in range(n):
        one = copy(request)
        one.request_id, one.sampling_params = parent.get_child_info(choice)
        requests.append(one)
    return requests


class _Errors:
    """Stands where vLLM has a request's queue, and takes the error by which vLLM ends a request."""

    def __init__(self, sink: Sink, call_id: str) -> None:
        self._sink = sink
        self._call_id = call_id

    def put(self, error: object) -> None:
        """Fail the call. Outputs never come here: `_ChoiceState` makes none."""
        assert isinstance(error, Exception)
        fail_call(self._sink, self._call_id, error)


class _StepLogprobs:
    """Stands where vLLM has a request's `LogprobsProcessor`: keeps a step's rows until the state takes them."""

    __slots__ = ("prompt", "rows")

    def __init__(self) -> None:
        self.rows: LogprobsLists | tuple[int, float] | None = None
        """A plain tuple is what `StepDecoder` makes of one token."""
        self.prompt: LogprobsTensors | None = None

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Take a step's log-probabilities; the prompt's come whole, with the first step."""
        self.rows = output.new_logprobs
        self.prompt = output.new_prompt_logprobs_tensors


class _ChoiceState(RequestState):
    """vLLM's state of one request, writing every step to the record of its call."""

    def bind(self, weights: CallWeights, call: EngineCall, sink: Sink) -> None:
        """Say where to write; called once, before the first step."""
        self._weights = weights
        self._stamp: str | None = None
        self._sink = sink
        self._k = call.sampling.top_logprobs or 0
        self._prompt_k = call.sampling.prompt_logprobs or 0
        self._steps = _StepLogprobs()
        self.logprobs_processor = cast("LogprobsProcessor", self._steps)

    @override
    def track_weight_version(self, weight_version: str) -> None:
        """Note with what the engine stamped the step that follows."""
        self._stamp = weight_version

    @override
    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: VllmFinishReason | None,
        stop_reason: int | str | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write the step to the record; there is never an output to hand on."""
        try:
            if self._steps.prompt is not None:
                self._write_prompt(self._steps.prompt)
            if new_token_ids:
                self._write_tokens(new_token_ids)
        except Exception as error:
            logger.exception("vLLM gave the call %s an unusable step", self.external_req_id)
            self._sink.fail(error)
        if finish_reason is VllmFinishReason.ERROR:
            self._sink.fail(CallError("vLLM ended this call with an error"))
        elif finish_reason is not None:
            self._sink.finish(self.request_index, FinishReason(str(finish_reason)), stop_reason)

    def _write_tokens(self, token_ids: list[int]) -> None:
        rows = self._steps.rows
        top: TopLogprobs | None = None
        if isinstance(rows, LogprobsLists):
            own = cast("list[int]", rows.logprob_token_ids[:, 0].tolist())
            logprobs: Sequence[float] = cast("list[float]", rows.logprobs[:, 0].tolist())
            top = _top(rows, self._k)
        elif rows is not None:
            token_id, logprob = rows
            own, logprobs = [token_id], (logprob,)
        else:
            raise CallError("vLLM gave no log-probabilities for sampled tokens")
        if own != token_ids:
            raise CallError("vLLM's log-probabilities belong to other tokens than those sampled")
        weights = self._weights.of_step(self._stamp)
        self._sink.append(self.request_index, token_ids, logprobs, weights=weights, top_logprobs=top)

    def _write_prompt(self, prompt: LogprobsTensors) -> None:
        # Every choice computes the prompt's; the first one's are the call's.
        if self.request_index > 0:
            return
        own = cast("list[float]", prompt.logprobs[:, 0].tolist())
        self._sink.take_prompt_logprobs(own, _top(prompt, self._prompt_k))


def _top(rows: LogprobsLists | LogprobsTensors, k: int) -> TopLogprobs | None:
    """Return columns 1 to k, the most probable tokens; rows may be wider, as other requests of the step asked."""
    if not k:
        return None
    return TopLogprobs(
        k,
        cast("list[int]", rows.logprob_token_ids[:, 1 : k + 1].flatten().tolist()),
        cast("list[float]", rows.logprobs[:, 1 : k + 1].flatten().tolist()),
    )
