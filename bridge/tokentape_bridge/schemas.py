"""The JSON that clients of chats send; `fields` says what holds for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from tokentape_bridge.errors import ApiError
from tokentape_bridge.fields import Ignored, Model, Refused, log_ignored_fields, reject_refused
from tokentape_bridge.sampling_fields import Recorded, SamplingFields


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
    function_call: Annotated[Any, Refused("give tool_calls")] = None
    audio: Annotated[Any, Refused("give its text as content")] = None
    refusal: Ignored = None
    generation_log_probs: Ignored = None
    """As an earlier answer had it, echoed: the tape has it."""


class PromptSource(Recorded):
    """What becomes the prompt: the fields that `/tokenize` and a chat have in common."""

    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A template argument of this name; one in `chat_template_kwargs` wins."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the opening of the assistant's answer; default: unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Whether the last message is left open, for the model to write on; default false."""
    required_prefix_token_ids: list[int] | None = None
    """Prompt and completion of the call that is continued, in one."""

    chat_template: Annotated[Any, Refused("the template is the model's own")] = None
    documents: Annotated[Any, Refused("put them into a message")] = None
    mm_processor_kwargs: Ignored = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The chat template's arguments."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    def echoed_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Prompt and completion of the call that gave the last answer, if the client echoes them; else empty."""
        if self.required_prefix_token_ids:
            return self.required_prefix_token_ids
        answer = next((message for message in reversed(messages) if message.role == "assistant"), None)
        if answer is None or not answer.prompt_token_ids or not answer.generation_token_ids:
            return []
        return answer.prompt_token_ids + answer.generation_token_ids


class TokenizeRequest(PromptSource):
    """The body of `POST /tokenize`: either `messages` or `prompt`."""

    messages: list[Message] | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to `prompt`; default true. Messages get the template's alone."""
    return_token_strs: bool | None = None
    """Whether the answer has the vocabulary's own text of each token beside its id."""


class ChatCompletionRequest(PromptSource, SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; wins."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    functions: Annotated[Any, Refused("give tools", unless=([],))] = None
    function_call: Annotated[Any, Refused("give tool_choice")] = None
    modalities: Annotated[Any, Refused("only text comes out", unless=(["text"],))] = None
    audio: Annotated[Any, Refused("only text comes out")] = None
    web_search_options: Annotated[Any, Refused("nothing here searches; give a tool that does")] = None
    add_special_tokens: Annotated[Any, Refused("the template writes them", unless=(False,))] = None
    prompt_logprobs: Annotated[Any, Refused("ask /v1/completions, with echo and logprobs")] = None

    echo: Ignored = None
    include_reasoning: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    safety_identifier: Ignored = None
    verbosity: Ignored = None


def log_ignored(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Log what `log_ignored_fields` does, of the request and of its messages."""
    log_ignored_fields(request)
    for message in request.messages or ():
        log_ignored_fields(message, "messages[].")


def reject_unsupported(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Raise `ApiError` for what a request may ask for but this bridge cannot do."""
    reject_refused(request)
    for index, message in enumerate(request.messages or ()):
        reject_refused(message, f"messages.{index}.")
    for index, tool in enumerate(request.tools or ()):
        if tool.get("type", "function") != "function":
            field = f"tools.{index}.type"
            raise ApiError(f"{field}: only functions are supported", param=field, code="unsupported_parameter")
    if request.continue_final_message and request.add_generation_prompt:
        field = "continue_final_message"
        raise ApiError(f"{field}: excludes add_generation_prompt", param=field, code="invalid_value")
    if isinstance(request, ChatCompletionRequest):
        _reject_unsupported_answer(request)


def _reject_unsupported_answer(request: ChatCompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options: needs stream to be true", param="stream_options", code="invalid_value")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs: needs logprobs to be true", param="top_logprobs", code="invalid_value")
