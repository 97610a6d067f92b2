"""Errors by which vLLM ends a request that it had taken, of vLLM's own classes and by its own queues."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from support.driven import Driven
from support.records import record
from tokentape_sidecar.engine import EngineCall, Sampling
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.rpc_errors import status_of
from tokentape_sidecar.weights import WeightObserver

with warnings.catch_warnings():
    # Torch's own and vLLM's, on import.
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.exceptions import GenerationError, QueueOverflowError, RetryableRequestError, VLLMValidationError
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    from tokentape_sidecar.vllm_engine import versions
    from tokentape_sidecar.vllm_engine.direct_path import DirectPath
    from tokentape_sidecar.vllm_engine.public_path import PublicPath

Status = grpc.StatusCode
MakePath = Callable[[AsyncLLM, WeightObserver], DirectPath | PublicPath]


class EndingEngine(Driven):
    """Takes every request, and then ends it by an error, as `AsyncLLM` does with what its core sends."""

    errored = False

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.input_processor = self.engine_core = self

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(self, request_id: str, prompt: Any, params: SamplingParams, **_: Any) -> EngineCoreRequest:
        token_ids = list(prompt["prompt_token_ids"])
        return EngineCoreRequest(request_id, token_ids, None, params, None, time.time(), None, None, None)

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        request.external_req_id = request.request_id

    def check_admission(self, n: int, request_id: str) -> None:
        """Admit all."""

    def _run_output_handler(self) -> None:
        """The core's answers are put below, where they come from."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        queue = self.output_processor.request_states[request.request_id].queue
        assert queue is not None
        queue.put(self.error)

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> RequestOutputCollector:
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
        collector.put(self.error)
        return collector


@pytest.fixture(params=[DirectPath, PublicPath])
def make_path(request: pytest.FixtureRequest) -> MakePath:
    return cast("MakePath", request.param)


async def ended_by(error: Exception, make_path: MakePath, *, n: int = 1) -> CallRecord:
    engine, call = cast("AsyncLLM", EndingEngine(error)), record(n=n)
    path = make_path(engine, WeightObserver(engine))
    one = EngineCall(call_id=call.call_id, prompt_token_ids=[1, 2, 3], sampling=Sampling(n=n))
    await path.submit(one, tokens_input([1, 2, 3]), SamplingParams(n=n, max_tokens=8, detokenize=False), call, None)
    async with asyncio.timeout(10):
        await call.wait_ended()
    await path.close()
    return call


def status(call: CallRecord) -> tuple[grpc.StatusCode, str]:
    assert call.error is not None
    return status_of(call.error)


PAUSED = "Generation is paused. Please retry after it resumes."


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RetryableRequestError(PAUSED), (Status.UNAVAILABLE, PAUSED)),
        (QueueOverflowError(), (Status.UNAVAILABLE, str(QueueOverflowError()))),
        (VLLMValidationError("no grammar"), (Status.INVALID_ARGUMENT, "sampling: no grammar")),
        (EngineDeadError(), (Status.UNAVAILABLE, "the engine died while it sampled this call")),
    ],
    ids=["to be made again", "no room", "wrong", "dead"],
)
async def test_what_vllm_says_of_a_request_is_the_calls_status(
    make_path: MakePath,
    error: Exception,
    expected: tuple[grpc.StatusCode, str],
    n: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        call = await ended_by(error, make_path, n=n)
    assert status(call) == expected
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError("in the output handler"), GenerationError("a failed step")], ids=repr)
async def test_what_may_be_a_fault_of_vllm_itself_is_logged_and_internal(
    make_path: MakePath, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    call = await ended_by(error, make_path)
    assert status(call) == (Status.INTERNAL, "the engine failed this call")
    (logged,) = caplog.records
    assert (logged.getMessage(), logged.exc_info and logged.exc_info[1]) == ("vLLM failed the call call-1", error)


class Later(Exception):
    """Of a release to come."""


@pytest.mark.parametrize(("means", "expected"), [("BUSY", Status.UNAVAILABLE), ("INVALID", Status.INVALID_ARGUMENT)])
async def test_classes_are_those_that_versions_lists(
    make_path: MakePath, monkeypatch: pytest.MonkeyPatch, means: str, expected: grpc.StatusCode
) -> None:
    assert status(await ended_by(Later(), make_path))[0] is Status.INTERNAL
    monkeypatch.setattr(versions, means, (Later,))
    assert status(await ended_by(Later(), make_path))[0] is expected
