"""A prompt's token ids, and the text of token ids."""

from __future__ import annotations

import asyncio

from tokentape_bridge.chat import conversation_of, prompt_of
from tokentape_bridge.errors import ApiError
from tokentape_bridge.responses import Json
from tokentape_bridge.schemas import TokenizeRequest, reject_unsupported
from tokentape_bridge.sidecar import Served, Sidecar
from tokentape_bridge.sidecar_pool import SidecarPool
from tokentape_bridge.text_schemas import DetokenizeRequest


async def tokenize(pool: SidecarPool, request: TokenizeRequest, tape_id: str) -> Json:
    """Return the token ids that a chat with the same fields on the same tape has for its prompt, or those of a text.

    They are the tokenizer's of the sidecar of `tape_id` (empty: of any). A prompt too long for the context is no error.
    """
    if (request.messages is None) == (request.prompt is None):
        raise ApiError("messages: give either messages or prompt", param="messages", code="invalid_value")
    reject_unsupported(request)
    sidecar, served = await pool.choose(tape_id, request.model)
    with sidecar.occupied():
        token_ids = await _token_ids(sidecar, served, request, tape_id)
    answer: Json = {
        "count": len(token_ids),
        "max_model_len": served.model.max_context_tokens,
        "tokens": token_ids,
    }
    if request.return_token_strs:
        answer["token_strs"] = [served.chat.tokenizer.token(token_id) for token_id in token_ids]
    return answer


async def _token_ids(sidecar: Sidecar, served: Served, request: TokenizeRequest, tape_id: str) -> list[int]:
    if request.messages is not None:
        conversation = conversation_of(request, request.messages, served.lora_name(request.model))
        return (await prompt_of(sidecar, served, conversation, tape_id, with_whole=True)).whole
    add_special_tokens = request.add_special_tokens is not False
    return await asyncio.to_thread(
        served.chat.tokenizer.encode, request.prompt or "", add_special_tokens=add_special_tokens
    )


async def detokenize(pool: SidecarPool, request: DetokenizeRequest, tape_id: str) -> Json:
    """Return the text of token ids, special tokens included.

    It is that of the sidecar of `tape_id` (empty: of any). Raises `ApiError` naming the first id that is none.
    """
    _, served = await pool.choose(tape_id, request.model)
    check_token_ids("tokens", request.tokens, served)
    text = await asyncio.to_thread(served.chat.decode, request.tokens, skip_special_tokens=False)
    return {"prompt": text}


def check_token_ids(field: str, token_ids: list[int], served: Served) -> None:
    """Raise `ApiError` for the first of `token_ids`, which the request has in `field`, that the model has not."""
    size = served.model.vocabulary_size
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= size):
        index, token_id = next((i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id < size)
        path = f"{field}.{index}"
        raise ApiError(
            f"{path}: {token_id} is not in the vocabulary of {size} tokens", param=path, code="invalid_value"
        )
