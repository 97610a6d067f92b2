"""The JSON that clients of the Messages API send; `fields` says what holds for all of it.

The `anthropic` package has these types as TypedDicts, which are for callers: pydantic reads their `Iterable` lazily and
once, and of their unions without a discriminator it reports every member. So they are models here, and a test holds
their fields against the package's. Blocks, messages and tools of other types than these are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tokentape_bridge.fields import Ignored, Model, Refused


class TextBlock(Model):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(Model):
    """Reasoning of an earlier answer, sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class ToolUseBlock(Model):
    """A tool call of an earlier answer, sent back."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


def _type_of(value: object) -> object:
    return cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None


def _only(*kinds: str) -> BeforeValidator:
    """Refuse blocks that have a type, but none of these."""

    def check(block: object) -> object:
        kind = _type_of(block)
        if isinstance(kind, str) and kind not in kinds:
            problem = "blocks of type {kind} are not supported here, only {kinds}"
            raise PydanticCustomError("block_type", problem, {"kind": ascii(kind[:40]), "kinds": ", ".join(kinds)})
        return block

    return BeforeValidator(check)


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Text: TypeAlias = Annotated[TextBlock, _only("text")]
Texts: TypeAlias = Annotated[list[_Text], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Text])]
"""A string, or text blocks."""


class ToolResultBlock(Model):
    """What a tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: Ignored = None
    cache_control: Ignored = None
    toolset_name: Ignored = None


_OfUser: TypeAlias = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type"), _only("text", "tool_result")]
_OfAssistant: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type"), _only("text", "thinking", "tool_use")
]


class UserMessage(Model):
    """What the user says, and what tools gave, in order."""

    role: Literal["user"]
    content: Annotated[list[_OfUser], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_OfUser])]


class AssistantMessage(Model):
    """An earlier answer; as the last message, the beginning of this one."""

    role: Literal["assistant"]
    content: Annotated[list[_OfAssistant], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_OfAssistant])]


class SystemMessage(Model):
    """A system prompt within the conversation."""

    role: Literal["system"]
    content: Texts


Message: TypeAlias = UserMessage | AssistantMessage | SystemMessage


class Tool(Model):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: str | None = None
    strict: Ignored = None
    cache_control: Ignored = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object) -> object:
        kind = _type_of(value)
        if isinstance(kind, str) and kind != "custom":
            problem = "tools of type {kind} are not supported, only those with an input_schema, which the client runs"
            raise PydanticCustomError("tool_type", problem, {"kind": ascii(kind[:40])})
        return value


class ToolChoice(Model):
    """Whether the model is to call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    """Whether the model is to think; `enabled` and `disabled` are told to the template."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Model):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class CountedOutputConfig(Model):
    """What of that reaches the prompt."""

    effort: str | None = None
    """The template argument `reasoning_effort`."""
    format: Ignored = None


class OutputConfig(CountedOutputConfig):
    """What the answer is to be like."""

    format: OutputFormat | None = None


class Metadata(Model):
    """What names the tape of a request; `tape_choice` has the rules."""

    user_id: str | None = None
    tape_id: str | None = None


class CountTokensRequest(Model):
    """The body of `POST /v1/messages/count_tokens`: all that becomes the prompt."""

    model: str
    messages: list[Annotated[Message, Field(discriminator="role")]]
    system: Texts | None = None
    tools: list[Tool] | None = None
    thinking: Thinking | None = None
    output_config: CountedOutputConfig | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """No field of Anthropic's: the template's arguments, as in a chat."""

    mcp_servers: Annotated[Any, Refused("give their tools as tools", unless=([],))] = None
    output_format: Annotated[Any, Refused("give output_config.format")] = None
    tool_choice: Ignored = None
    cache_control: Ignored = None
    context_management: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None


class MessageRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    # Requests are not written to, so that a narrower type is no harm.
    output_config: OutputConfig | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    container: Annotated[Any, Refused("no code runs here")] = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    service_tier: Ignored = None
