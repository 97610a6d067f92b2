"""Plain completions, from request to answer: one call for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape.v1.types_pb2 import SPLIT_CAUSE_NEW_CONVERSATION, SamplingParameters
from tokentape_bridge.calls import call_for
from tokentape_bridge.completion import collect
from tokentape_bridge.errors import ApiError, from_rpc
from tokentape_bridge.responses import Json
from tokentape_bridge.sampling import common_sampling_parameters, set_max_tokens
from tokentape_bridge.sidecar import Served, Sidecar
from tokentape_bridge.sidecar_pool import SidecarPool
from tokentape_bridge.text_responses import TextPrompt, text_completion, text_head
from tokentape_bridge.text_schemas import CompletionRequest, reject_unsupported
from tokentape_bridge.tokens import check_token_ids

_MAX_PROMPTS = 2048
"""As OpenAI's."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TextJob:
    """A request, ready to be sampled."""

    sidecar: Sidecar
    served: Served
    model: str
    prompts: list[TextPrompt]
    calls: list[GenerateRequest]
    """One for each prompt."""


async def complete_text(pool: SidecarPool, request: CompletionRequest, tape_id: str) -> Json:
    """Return the answer to `request`, each prompt sampled and recorded on the tape `tape_id` (empty: on none).

    Raises `ApiError` for what is wrong with the request, and for what the sidecar says.
    """
    job = await prepare(pool, request, tape_id)
    count = request.n or 1
    with job.sidecar.occupied():
        calls = await run_all(collect(job.sidecar.generate(call, at_end=True), count) for call in job.calls)
    return await asyncio.to_thread(
        text_completion,
        request,
        job.prompts,
        calls,
        head=text_head(job.model, calls[0].call_id),
        tape_id=tape_id,
        tokenizer=job.served.chat.tokenizer,
    )


async def prepare(pool: SidecarPool, request: CompletionRequest, tape_id: str) -> TextJob:
    """Return `request` ready to be sampled. Raises `ApiError` for what is wrong with it."""
    reject_unsupported(request)
    if len(request.prompts) > _MAX_PROMPTS:
        raise ApiError(f"prompt: there may be {_MAX_PROMPTS} at most", param="prompt", code="invalid_value")
    sampling = _sampling_parameters(request)
    sidecar, served = await pool.choose(tape_id, request.model)
    _check_logprobs(request, served)
    # Occupied, so that it is not closed meanwhile.
    with sidecar.occupied():
        prompts = await asyncio.to_thread(_read_prompts, request, served)
    template = call_for(request, sampling, tape_id=tape_id, lora_name=served.lora_name(request.model))
    if tape_id:
        # A prompt of its own, whatever was before.
        template.split_cause = SPLIT_CAUSE_NEW_CONVERSATION
    calls: list[GenerateRequest] = []
    for prompt in prompts:
        call = GenerateRequest()
        call.CopyFrom(template)
        call.prompt_token_ids.extend(prompt.token_ids)
        calls.append(call)
    return TextJob(sidecar, served, request.model or served.model.name, prompts, calls)


def _sampling_parameters(request: CompletionRequest) -> SamplingParameters:
    sampling = common_sampling_parameters(request)
    set_max_tokens(sampling, "max_tokens", request.limit)
    if request.logprobs is not None:
        sampling.top_logprobs = request.logprobs
    echoed = request.logprobs if request.echo else None
    wanted = [count for count in (echoed, request.prompt_logprobs) if count is not None]
    if wanted:
        sampling.prompt_logprobs = max(wanted)
    return sampling


def _check_logprobs(request: CompletionRequest, served: Served) -> None:
    most = served.model.max_top_logprobs
    for field in ("logprobs", "prompt_logprobs"):
        if (getattr(request, field) or 0) > most:
            raise ApiError(f"{field}: must be at most {most}", param=field, code="invalid_value")


def _read_prompts(request: CompletionRequest, served: Served) -> list[TextPrompt]:
    several = len(request.prompts) > 1
    return [
        _read_prompt(prompt, request, served, f"prompt.{index}" if several else "prompt")
        for index, prompt in enumerate(request.prompts)
    ]


def _read_prompt(prompt: str | list[int], request: CompletionRequest, served: Served, field: str) -> TextPrompt:
    tokenizer = served.chat.tokenizer
    if not isinstance(prompt, str):
        check_token_ids(field, prompt, served)
        return TextPrompt(prompt, tokenizer.decode(prompt, skip_special_tokens=False) if request.echo else "")
    added = request.add_special_tokens is not False
    token_ids = tokenizer.encode(prompt, add_special_tokens=added, field=field)
    if not token_ids:
        raise ApiError(f"{field}: must have at least one token", param=field, code="invalid_value")
    whole = tokenizer.decode(token_ids, skip_special_tokens=False) if request.echo else prompt
    return TextPrompt(token_ids, prompt, max(0, whole.find(prompt)))


async def run_all(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run calls at once. The first to fail ends the others, and is raised: `ApiError` for what the sidecar says."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise (_for_prompts(first) if isinstance(first, grpc.aio.AioRpcError) else first) from None
    return [task.result() for task in running]


def _for_prompts(error: grpc.aio.AioRpcError) -> ApiError:
    """Return what a sidecar said, in the words of this request: it has a prompt, and no messages."""
    said = from_rpc(error)
    if said.param == "messages":
        said.param, said.message = "prompt", said.message.replace("messages: ", "prompt: ", 1)
    return said
