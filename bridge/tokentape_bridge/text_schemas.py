"""The JSON that clients of plain completions and of `/detokenize` send; `fields` says what holds for all of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from tokentape_bridge.errors import ApiError
from tokentape_bridge.fields import Ignored, Refused, reject_refused
from tokentape_bridge.sampling_fields import Recorded, SamplingFields

_DEFAULT_MAX_TOKENS = 16


def _in_one_sentence(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    try:
        return handler(value)
    except ValidationError:
        # Of a union, every member has its complaint.
        raise PydanticCustomError(
            "prompt", "must be a text, token ids, or a list of texts or of lists of ids"
        ) from None


Prompts = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_in_one_sentence)]
"""One prompt or several, each as text or as token ids."""


class CompletionRequest(Recorded, SamplingFields):
    """The body of `POST /v1/completions`."""

    model: str | None = None
    prompt: Prompts
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a prompt that is text; default true."""
    max_tokens: int | None = None
    """Default 16, as OpenAI's."""
    echo: bool | None = None
    """Whether each choice's text, and its log-probabilities, begin with the prompt's."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """How many of the most probable tokens are told at each position, beside the one that is there."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """The same for the prompt's positions, in vLLM's form."""

    suffix: Annotated[Any, Refused("put it into the prompt, in the model's own form", unless=("",))] = None
    prompt_cache_key: Ignored = None
    safety_identifier: Ignored = None

    @property
    def limit(self) -> int:
        """Most tokens of each choice."""
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or more. Raises `ApiError` where there is none, or an empty one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or [] in self.prompt:
            raise ApiError("prompt: must not be empty", param="prompt", code="invalid_value")
        # The validator has seen to it that the items are all of one kind.
        items: Any = self.prompt
        return [items] if isinstance(items[0], int) else items


class DetokenizeRequest(Recorded):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def reject_unsupported(request: CompletionRequest) -> None:
    """Raise `ApiError` for what a completion may ask for but this bridge cannot do."""
    reject_refused(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options: needs stream to be true", param="stream_options", code="invalid_value")
