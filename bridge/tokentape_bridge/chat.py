"""Chat completions, from request to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape_bridge.calls import call_for
from tokentape_bridge.completion import collect
from tokentape_bridge.continuation import Prompt, continue_or_render
from tokentape_bridge.messages import to_template_messages
from tokentape_bridge.parents import Conversation
from tokentape_bridge.responses import Json, chat_completion
from tokentape_bridge.sampling import to_sampling_parameters
from tokentape_bridge.schemas import ChatCompletionRequest, Message, PromptSource, reject_unsupported
from tokentape_bridge.sidecar import Served, Sidecar
from tokentape_bridge.sidecar_pool import SidecarPool


@dataclass(frozen=True, slots=True)
class Chat:
    """A request whose prompt is made, ready to be sampled."""

    sidecar: Sidecar
    served: Served
    model_name: str
    """As the answer gives it."""
    conversation: Conversation
    prompt: Prompt
    call: GenerateRequest


@asynccontextmanager
async def prepare(pool: SidecarPool, request: ChatCompletionRequest, tape_id: str) -> AsyncGenerator[Chat]:
    """Give the chat that `request` asks for, on the tape `tape_id` (empty: on none); its sidecar counts it meanwhile.

    Raises `ApiError` for what is wrong with the request, `AioRpcError` for what the sidecar says.
    """
    reject_unsupported(request)
    sampling = to_sampling_parameters(request)
    sidecar, served = await pool.choose(tape_id, request.model)
    lora_name = served.lora_name(request.model)
    call = call_for(request, sampling, tape_id=tape_id, lora_name=lora_name)
    conversation = conversation_of(request, request.messages, lora_name)
    with sidecar.occupied():
        prompt = await prompt_of(sidecar, served, conversation, tape_id, with_whole=request.wants_token_ids)
        prompt.put_into(call, conversation)
        yield Chat(sidecar, served, request.model or served.model.name, conversation, prompt, call)


async def complete_chat(pool: SidecarPool, request: ChatCompletionRequest, tape_id: str) -> Json:
    """Return the whole answer to `request`, sampled and recorded on the tape. Raises what `prepare` does."""
    async with prepare(pool, request, tape_id) as chat:
        call = await collect(chat.sidecar.generate(chat.call, at_end=True), request.n or 1)
    return await asyncio.to_thread(
        chat_completion,
        request,
        call,
        model=chat.model_name,
        tape_id=tape_id,
        prompt=chat.prompt,
        conversation=chat.conversation,
        chat=chat.served.chat,
    )


def conversation_of(source: PromptSource, messages: Sequence[Message], lora_name: str = "") -> Conversation:
    """Return what the model, or its adapter `lora_name`, is asked to continue.

    Raises `ApiError` naming what no template could take.
    """
    # Whatever tool_choice says, the tools are rendered: /tokenize is not told of it, and must give the same prompt.
    open_end = bool(source.continue_final_message)
    return Conversation(
        to_template_messages(messages, last_is_open=open_end),
        source.tools,
        source.template_arguments,
        add_generation_prompt=not open_end and source.add_generation_prompt is not False,
        continue_final_message=open_end,
        lora_name=lora_name,
        echoed_token_ids=source.echoed_token_ids(messages),
    )


async def prompt_of(
    sidecar: Sidecar, served: Served, conversation: Conversation, tape_id: str, *, with_whole: bool
) -> Prompt:
    """Return the prompt for `conversation`: on a tape, what continues an earlier call if one can be proved.

    `with_whole`: whether all its ids are wanted. Raises `ApiError` where the template refuses the messages.
    """
    if not tape_id:
        return Prompt(await asyncio.to_thread(served.chat.render, conversation))
    return await continue_or_render(
        served.chat, conversation, sidecar.find_calls, tape_id=tape_id, with_whole=with_whole
    )
