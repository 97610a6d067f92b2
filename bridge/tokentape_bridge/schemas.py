"""The JSON that clients send.

Types are strict (a string is no number), an explicit null means absent, and unknown fields are ignored: each is named
in the log once. Ranges are the sidecar's to judge.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from tokentape_bridge.errors import ApiError

_logger = logging.getLogger(__name__)
_MAX_NAMES_LOGGED = 200
_names_logged: set[str] = set()


class Model(BaseModel):
    """What all of a request's objects have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Function(Model):
    """The function that a tool call names."""

    name: str
    arguments: str | None = None
    """JSON text, as the model wrote it."""


class ToolCall(Model):
    """One tool call of an assistant message."""

    id: str | None = None
    type: str | None = None
    function: Function


class Message(Model):
    """One message of the conversation. `messages.py` judges role and content."""

    role: str
    content: Any = None
    """Text, null, or a list of parts."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    prompt_token_ids: list[int] | None = None
    """As an earlier answer had it, echoed."""
    generation_token_ids: list[int] | None = None
    """Likewise."""


class PromptSource(Model):
    """What becomes the prompt: the fields that `/tokenize` and a chat have in common."""

    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the opening of the assistant's answer; default true."""


class TokenizeRequest(PromptSource):
    """The body of `POST /tokenize`: either `messages` or `prompt`."""

    messages: list[Message] | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to `prompt`; default true. Messages get the template's alone."""


class JsonSchema(Model):
    """The schema of a `response_format`."""

    schema_: dict[str, Any] | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class ResponseFormat(Model):
    """OpenAI's way to ask for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletionRequest(PromptSource):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message]

    # Sampling; absent means the model's default.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_one_or_many)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None

    # What the answer shows.
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text; default true."""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    # Tools.
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    # Passed on to the sidecar.
    metadata: dict[str, Any] | None = None
    """`tape_id` in it names the tape to record on."""
    priority: int | None = None
    cache_salt: str | None = None

    required_prefix_token_ids: list[int] | None = None
    """Prompt and completion of the call that is continued, in one."""

    # Known and without effect here.
    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def echoed_token_ids(self) -> list[int]:
        """Prompt and completion of the call that gave the last answer, if the client echoes them; else empty."""
        if self.required_prefix_token_ids:
            return self.required_prefix_token_ids
        answer = next((message for message in reversed(self.messages) if message.role == "assistant"), None)
        if answer is None or not answer.prompt_token_ids or not answer.generation_token_ids:
            return []
        return answer.prompt_token_ids + answer.generation_token_ids

    @property
    def wants_token_ids(self) -> bool:
        """Whether the answer carries token ids beside the text."""
        return bool(self.return_token_ids or self.return_tokens_as_token_ids)


def log_ignored_fields(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Log the fields of `request` that nothing here knows, each name once in the life of the process."""
    _log_names(request.model_extra or ())
    for message in request.messages or ():
        _log_names(f"messages[].{name}" for name in message.model_extra or ())


def _log_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in _names_logged and len(_names_logged) < _MAX_NAMES_LOGGED:
            _names_logged.add(name)
            _logger.info("ignoring the unknown request field %.80a", name)


def reject_unsupported(request: ChatCompletionRequest) -> None:
    """Raise `ApiError` for what a chat may ask for but this bridge cannot do."""
    if request.stream:
        raise ApiError("stream: streaming is not supported yet; leave it out or send false", param="stream")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs")
