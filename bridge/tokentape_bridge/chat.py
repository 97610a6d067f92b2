"""Chat completions and their prompts, from request to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.completion import collect
from tokentape_bridge.continuation import Prompt, continue_or_render
from tokentape_bridge.errors import ApiError
from tokentape_bridge.messages import to_template_messages
from tokentape_bridge.parents import Conversation
from tokentape_bridge.responses import Json, chat_completion
from tokentape_bridge.sampling import fit, to_sampling_parameters
from tokentape_bridge.schemas import ChatCompletionRequest, Message, PromptSource, TokenizeRequest, reject_unsupported
from tokentape_bridge.sidecar_pool import SidecarPool


async def complete_chat(pool: SidecarPool, request: ChatCompletionRequest, tape_id: str) -> Json:
    """Return the answer to `request`, sampled and recorded on the tape `tape_id` (empty: on none).

    Raises `ApiError` for what is wrong with the request, `AioRpcError` for what the sidecar says.
    """
    reject_unsupported(request)
    call_request = _to_generate_request(request, tape_id)
    sidecar, served = await pool.choose(tape_id, request.model)
    conversation = _conversation(request, request.messages, request.echoed_token_ids)
    with sidecar.occupied():
        if tape_id:
            prompt = await continue_or_render(
                served.chat, conversation, sidecar.find_calls, tape_id=tape_id, with_whole=request.wants_token_ids
            )
        else:
            prompt = Prompt(await asyncio.to_thread(served.chat.render, conversation))
        prompt.put_into(call_request, conversation)
        call = await collect(sidecar.generate(call_request), call_request.sampling.n or 1)
    return await asyncio.to_thread(
        chat_completion,
        request,
        call,
        model=served.model.name,
        tape_id=tape_id,
        prompt=prompt,
        conversation=conversation,
        chat=served.chat,
    )


async def tokenize(pool: SidecarPool, request: TokenizeRequest) -> Json:
    """Return the token ids that a chat with the same fields would have for its prompt, or those of a text.

    A prompt too long for the context is no error here.
    """
    if (request.messages is None) == (request.prompt is None):
        raise ApiError("messages: give either messages or prompt", param="messages", code="invalid_value")
    _, served = await pool.choose("", request.model)
    if request.messages is not None:
        tokens = await asyncio.to_thread(_render, served.chat, request, request.messages)
    else:
        add_special_tokens = request.add_special_tokens is not False
        tokens = await asyncio.to_thread(
            served.chat.tokenizer.encode, request.prompt or "", add_special_tokens=add_special_tokens
        )
    return {"count": len(tokens), "max_model_len": served.model.max_context_tokens, "tokens": tokens}


def requested_tape_id(request: ChatCompletionRequest, header: str | None) -> str:
    """Return the tape id in `metadata.tape_id`, else that in the header; empty when there is none.

    Raises `ApiError` when both are there and differ.
    """
    in_metadata: object = (request.metadata or {}).get("tape_id")
    if in_metadata is None:
        return header or ""
    if not isinstance(in_metadata, str) or header not in (None, in_metadata):
        problem = "is not the tape of the header x-tape-id" if isinstance(in_metadata, str) else "must be a string"
        raise ApiError(f"metadata.tape_id: {problem}", param="metadata.tape_id", code="invalid_value")
    return in_metadata


def _to_generate_request(request: ChatCompletionRequest, tape_id: str) -> GenerateRequest:
    """Return the call for `request`, without its prompt."""
    call = GenerateRequest(sampling=to_sampling_parameters(request))
    fit("metadata.tape_id", setattr, call, "tape_id", tape_id)
    if request.cache_salt is not None:
        fit("cache_salt", setattr, call, "cache_salt", request.cache_salt)
    if request.priority is not None:
        fit("priority", setattr, call, "priority", request.priority)
    return call


def _conversation(
    source: PromptSource, messages: Sequence[Message], echoed_token_ids: Sequence[int] = ()
) -> Conversation:
    # Whatever tool_choice says, the tools are rendered: /tokenize is not told of it, and must give the same prompt.
    return Conversation(
        to_template_messages(messages),
        source.tools,
        source.chat_template_kwargs or {},
        add_generation_prompt=source.add_generation_prompt is not False,
        echoed_token_ids=echoed_token_ids,
    )


def _render(chat: ChatModel, source: PromptSource, messages: Sequence[Message]) -> list[int]:
    return chat.render(_conversation(source, messages))
