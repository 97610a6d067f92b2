"""OpenAI's JSON for what a call sampled.

Ids and log-probabilities are the sidecar's own, never computed from text. The text is decoded from the ids: without the
stop token that ended it (which stays in the ids, with its log-probability), and cut before a stop string.

msgspec writes null for NaN and infinities, without an error. None comes so far: `tokentape.many_calls_stream` fails a
call that has one as a log-probability, but for the -infinity of a token that was not sampled, which `told_logprob`
replaces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from tokentape.v1 import types_pb2
from tokentape.v1.types_pb2 import Completion as FinishedEvent
from tokentape_bridge.answers import Answer
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.completion import Call, Choice
from tokentape_bridge.continuation import Prompt
from tokentape_bridge.parents import Conversation
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.tokenizer import Tokenizer
from tokentape_bridge.tool_calls import ToolCall

Json = dict[str, Any]
"""A JSON object."""

_LEAST_LOGPROB = -9999.0

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
    prompt: Prompt,
    conversation: Conversation,
    chat: ChatModel,
) -> Json:
    """Return the body of an unstreamed chat completion. CPU work, of the size of the completion.

    With `return_token_ids` or `return_tokens_as_token_ids` it has the ids where NeMo Gym's and vLLM's clients look: on
    the message, on the choice, and the prompt's at the top level.
    """
    ids = prompt.whole if request.wants_token_ids else None
    completion_tokens = sum(len(choice.token_ids) for choice in call.choices)
    body: Json = {
        "id": f"chatcmpl-{call.call_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _chat_choice(request, choice, f"{call.call_id}-{index}", conversation, chat, prompt_token_ids=ids)
            | {"index": index}
            for index, choice in enumerate(call.choices)
        ],
        "usage": usage(call.prompt_token_count, completion_tokens),
        "tokentape": extension(tape_id, call.call_id, prompt, conversation, chat.tokenizer),
    }
    if ids is not None:
        body["prompt_token_ids"] = ids
    return body


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return OpenAI's account of a call: its prompt's tokens, and those of all its choices."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def extension(tape_id: str, call_id: str, prompt: Prompt, conversation: Conversation, tokenizer: Tokenizer) -> Json:
    """Say on which tape the call is, and what became of the conversation's earlier calls. CPU work."""
    cause = types_pb2.SplitCause.Name(prompt.split_cause).removeprefix("SPLIT_CAUSE_").lower()
    return {
        "tape_id": tape_id or None,
        "call_id": call_id,
        "parent_call_id": prompt.parent.call_id if prompt.parent else None,
        "prefix": "kept" if prompt.parent else "new",
        "split_cause": cause if tape_id and not prompt.parent else None,
        "special_token_text": tokenizer.spells_special_token(conversation.messages),
    }


def _chat_choice(
    request: ChatCompletionRequest,
    choice: Choice,
    name: str,
    conversation: Conversation,
    chat: ChatModel,
    *,
    prompt_token_ids: Sequence[int] | None,
) -> Json:
    finished = choice.finished
    assert finished is not None, "collect returns finished choices only"
    answer = chat.parse(
        choice.token_ids,
        finished,
        conversation,
        with_tools=request.tool_choice != "none",
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )
    if request.parallel_tool_calls is False:
        answer = answer.with_first_call_only()
    message = _message(answer, name)
    body: Json = {
        "message": message,
        "logprobs": {"content": logprob_entries(request, choice, chat.tokenizer)} if request.logprobs else None,
        "finish_reason": finish_reason(finished, has_calls=bool(answer.tool_calls)),
        "stop_reason": stop_reason(finished),
    }
    if prompt_token_ids is not None:
        message["prompt_token_ids"] = prompt_token_ids
        message["generation_token_ids"] = choice.token_ids
        message["generation_log_probs"] = choice.logprobs
        body["token_ids"] = choice.token_ids
    return body


def _message(answer: Answer, name: str) -> Json:
    message: Json = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [tool_call(name, index, call) for index, call in enumerate(answer.tool_calls)]
    return message


def tool_call(choice_name: str, index: int, call: ToolCall) -> Json:
    """Return OpenAI's JSON for the call at `index` of a choice, whose name makes its id unique."""
    return {
        "id": f"{choice_name}-{index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_text},
    }


def finish_reason(finished: FinishedEvent, *, has_calls: bool) -> str:
    """Return why a choice ended, in the field's words."""
    return "tool_calls" if has_calls else _FINISH_REASONS[finished.finish_reason]


def stop_reason(finished: FinishedEvent) -> int | str | None:
    """Return the stop token's id or the stop string that matched; `None` for the model's own end."""
    match finished.WhichOneof("stop_reason"):
        case "stop_token_id":
            return finished.stop_token_id
        case "stop_string":
            return finished.stop_string
        case None:
            return None


class SampledTokens(Protocol):
    """Tokens with their log-probabilities, in columns of one length."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The sampled ids."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Their log-probabilities."""
        ...

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]]:
        """At each position the most probable tokens as (id, log-probability), best first."""
        ...


def logprob_entries(request: ChatCompletionRequest, tokens: SampledTokens, tokenizer: Tokenizer) -> list[Json]:
    """Return OpenAI's `logprobs.content` of tokens: an entry for each."""
    as_ids = bool(request.return_tokens_as_token_ids)
    columns = zip(tokens.token_ids, tokens.logprobs, tokens.top_logprobs, strict=True)
    return [
        {
            **_logprob(token_id, logprob, tokenizer, as_id=as_ids),
            "top_logprobs": [_logprob(other, told_logprob(value), tokenizer, as_id=as_ids) for other, value in top],
        }
        for token_id, logprob, top in columns
    ]


def told_logprob(alternative: float) -> float:
    """Return the log-probability of a token that was not sampled, as JSON can have it.

    It is -infinity where top_p, top_k or a grammar rules the token out; OpenAI and vLLM write -9999.0.
    """
    return max(alternative, _LEAST_LOGPROB)


def _logprob(token_id: int, logprob: float, tokenizer: Tokenizer, *, as_id: bool) -> Json:
    token = tokenizer.shown(token_id)
    return {
        "token": f"token_id:{token_id}" if as_id else token.text,
        "logprob": logprob,
        "bytes": token.byte_values,
    }
