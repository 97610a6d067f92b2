"""OpenAI's JSON for what a call sampled.

Ids and log-probabilities are the sidecar's own, never computed from text. The text is decoded from the ids: without the
stop token that ended it (which stays in the ids, with its log-probability), and cut before a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tokentape.v1 import types_pb2
from tokentape.v1.types_pb2 import Completion as FinishedEvent
from tokentape_bridge.completion import Call, Choice
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.tokenizer import Tokenizer

Json = dict[str, Any]
"""A JSON object."""

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
}
"""As vLLM writes them; OpenAI has no word for the last two."""


def chat_completion(
    request: ChatCompletionRequest,
    call: Call,
    *,
    model: str,
    tape_id: str,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer,
) -> Json:
    """Return the body of an unstreamed chat completion. CPU work, of the size of the completion.

    With `return_token_ids` or `return_tokens_as_token_ids` it has the ids where NeMo Gym's and vLLM's clients look: on
    the message, on the choice, and the prompt's at the top level.
    """
    choices = [
        _chat_choice(request, choice, index, prompt_token_ids, tokenizer) for index, choice in enumerate(call.choices)
    ]
    completion_tokens = sum(len(choice.token_ids) for choice in call.choices)
    body: Json = {
        "id": f"chatcmpl-{call.call_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": call.prompt_token_count,
            "completion_tokens": completion_tokens,
            "total_tokens": call.prompt_token_count + completion_tokens,
        },
        "tokentape": {"tape_id": tape_id or None, "call_id": call.call_id},
    }
    if request.wants_token_ids:
        body["prompt_token_ids"] = prompt_token_ids
    return body


def _chat_choice(
    request: ChatCompletionRequest, choice: Choice, index: int, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> Json:
    finished = choice.finished
    assert finished is not None, "collect returns finished choices only"
    message: Json = {"role": "assistant", "content": _text(request, choice, finished, tokenizer)}
    body: Json = {
        "index": index,
        "message": message,
        "logprobs": {"content": _logprobs(request, choice, tokenizer)} if request.logprobs else None,
        "finish_reason": _FINISH_REASONS[finished.finish_reason],
        "stop_reason": _stop_reason(finished),
    }
    if request.wants_token_ids:
        message["prompt_token_ids"] = prompt_token_ids
        message["generation_token_ids"] = choice.token_ids
        message["generation_log_probs"] = choice.logprobs
        body["token_ids"] = choice.token_ids
    return body


def _stop_reason(finished: FinishedEvent) -> int | str | None:
    match finished.WhichOneof("stop_reason"):
        case "stop_token_id":
            return finished.stop_token_id
        case "stop_string":
            return finished.stop_string
        case None:
            return None


def _text(request: ChatCompletionRequest, choice: Choice, finished: FinishedEvent, tokenizer: Tokenizer) -> str:
    skip_special_tokens = request.skip_special_tokens is not False
    token_ids = choice.token_ids
    stopped = finished.finish_reason == types_pb2.FINISH_REASON_STOP
    if not stopped or not finished.HasField("stop_string"):
        # Stopped by a token, that token is the last.
        return tokenizer.decode(token_ids[:-1] if stopped else token_ids, skip_special_tokens=skip_special_tokens)
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    # Within the first min_tokens a stop string does not count; one that ends later does.
    spared = tokenizer.decode(token_ids[: request.min_tokens or 0], skip_special_tokens=skip_special_tokens)
    start = text.find(finished.stop_string, max(0, len(spared) - len(finished.stop_string) + 1))
    return text if start < 0 else text[:start]


def _logprobs(request: ChatCompletionRequest, choice: Choice, tokenizer: Tokenizer) -> list[Json]:
    as_ids = bool(request.return_tokens_as_token_ids)
    columns = zip(choice.token_ids, choice.logprobs, choice.top_logprobs, strict=True)
    return [
        _logprob(token_id, logprob, tokenizer, as_id=as_ids)
        | {"top_logprobs": [_logprob(other, value, tokenizer, as_id=as_ids) for other, value in top]}
        for token_id, logprob, top in columns
    ]


def _logprob(token_id: int, logprob: float, tokenizer: Tokenizer, *, as_id: bool) -> Json:
    token_bytes = tokenizer.token_bytes(token_id)
    token = f"token_id:{token_id}" if as_id else token_bytes.decode(errors="replace")
    return {"token": token, "logprob": logprob, "bytes": list(token_bytes)}
