"""The request fields that say how to sample and what the answer shows: the same for chats and for plain completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tokentape_bridge.fields import Ignored, Model, Refused


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class JsonSchema(Model):
    """The schema of a `response_format`."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Model):
    """OpenAI's way to ask for structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Model):
    """vLLM's way: exactly one of these."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    """A context-free grammar in EBNF."""
    choice: list[str] | None = None
    structural_tag: str | None = None
    """In XGrammar's format, as JSON text."""


class StreamOptions(Model):
    """OpenAI's options of a streamed answer."""

    include_usage: bool | None = None


_STRUCTURED = Refused("give structured_outputs")


class SamplingFields(Model):
    """How to sample; absent means the model's default. Names are the contract's, but for the forms of output."""

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
    min_tokens: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_one_or_many)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # What the answer shows.
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text; default true."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Passed on to the sidecar.
    priority: int | None = None
    cache_salt: str | None = None

    # What this bridge cannot do.
    best_of: Annotated[Any, Refused("give n, and choose yourself", unless=(1,))] = None
    use_beam_search: Annotated[Any, Refused("a beam is not sampled", unless=(False,))] = None
    include_stop_str_in_output: Annotated[Any, Refused("its ids are in the token ids", unless=(False,))] = None
    truncate_prompt_tokens: Annotated[Any, Refused("a prompt is never cut")] = None
    prompt_embeds: Annotated[Any, Refused("a prompt is text or token ids")] = None
    guided_json: Annotated[Any, _STRUCTURED] = None
    guided_regex: Annotated[Any, _STRUCTURED] = None
    guided_choice: Annotated[Any, _STRUCTURED] = None
    guided_grammar: Annotated[Any, _STRUCTURED] = None

    # What means nothing here.
    store: Ignored = None
    service_tier: Ignored = None

    @property
    def wants_token_ids(self) -> bool:
        """Whether the answer carries token ids beside the text."""
        return bool(self.return_token_ids or self.return_tokens_as_token_ids)

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with the counts of its tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Recorded(Model):
    """What names the tape of a request; `tape_choice` has the rules."""

    metadata: dict[str, Any] | None = None
    """`tape_id` in it names the tape."""
    user: str | None = None
    """Names the tape where it is of a tape id's form; anything else means nothing."""
