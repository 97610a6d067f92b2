"""Model families of the `renderers` package: reading completions and bridging turns by code made for one family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from tokentape_bridge.answers import Answer, ToolCall
from tokentape_bridge.errors import ApiError
from tokentape_bridge.messages import TemplateMessage


class FamilyError(Exception):
    """There is no such family, or it does not fit the tokenizer."""


class _Renderer(Protocol):
    """What is used of `renderers.Renderer`, typed."""

    def render_ids(self, messages: list[Any], *, tools: Any, add_generation_prompt: bool) -> list[int]: ...
    def parse_response(self, token_ids: list[int], *, tools: Any, prompt_ids: list[int]) -> Any: ...
    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: list[Any], *, tools: Any
    ) -> Any: ...


class Family:
    """One family's renderer over one tokenizer."""

    def __init__(self, renderer: _Renderer, keeping: _Renderer) -> None:
        """Use `load`. `keeping` is the renderer that bridges turns with all reasoning left in."""
        self._renderer = renderer
        self._keeping = keeping

    @classmethod
    def load(cls, name: str, tokenizer: object) -> Family:
        """Return the family `name` ("qwen3", "gpt-oss", …) for a transformers tokenizer. Raises `FamilyError`."""
        try:
            import renderers  # noqa: PLC0415 - takes a second, and most bridges need none

            config: Any = renderers.config_from_name(name)
            configs = config, type(config)(thinking_retention="all")
            plain, keeping = (renderers.create_renderer(tokenizer, each) for each in configs)
            return cls(cast("_Renderer", plain), cast("_Renderer", keeping))
        except ModuleNotFoundError as error:
            problem = f"the renderer {name!r} needs more packages: pip install 'tokentape[renderers]' ({error})"
            raise FamilyError(problem) from error
        except Exception as error:
            raise FamilyError(f"the renderer {name!r} cannot be used: {error}") from error

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Return the ids of a whole conversation. Raises `ApiError` where the renderer cannot render it."""
        try:
            return list(
                self._renderer.render_ids(
                    _with_tool_names(messages), tools=_plain(tools), add_generation_prompt=add_generation_prompt
                )
            )
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Its words may quote the messages.
            problem = f"messages: the renderer cannot render them ({type(error).__name__})"
            raise ApiError(problem, param="messages", code="chat_template_error") from None

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None,
        with_tools: bool,
    ) -> Answer:
        """Return what a completion says that was sampled after a prompt, which may have opened reasoning.

        Only calls that the renderer found well formed are calls, and only `with_tools`; the others stay content.
        """
        parsed = self._renderer.parse_response(list(token_ids), tools=_plain(tools), prompt_ids=list(prompt_token_ids))
        calls: list[ToolCall] = []
        content = [str(parsed.content or "")]
        for call in parsed.tool_calls:
            if with_tools and call.status == "ok" and isinstance(call.arguments, dict):
                arguments = cast("dict[str, Any]", call.arguments)
                calls.append(ToolCall(call.name, arguments, json.dumps(arguments, ensure_ascii=False)))
            else:
                content.append(call.raw)
        return Answer("\n".join(filter(None, content)), parsed.reasoning_content, tuple(calls))

    def bridge_turns(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        messages: Sequence[TemplateMessage],
        answer: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        keep_reasoning: bool,
    ) -> list[int] | None:
        """Return the ids that the renderer puts after prompt and completion for the messages after that at `answer`.

        `None` where it refuses, or would change prompt or completion. With `keep_reasoning` it does so as well where it
        would leave reasoning out of a new rendering.
        """
        renderer = self._keeping if keep_reasoning else self._renderer
        new_messages = _with_tool_names(messages)[answer + 1 :]
        before = [*prompt_token_ids, *completion_token_ids]
        rendered = renderer.bridge_to_next_turn(
            list(prompt_token_ids), list(completion_token_ids), new_messages, tools=_plain(tools)
        )
        if rendered is None or list(rendered.token_ids[: len(before)]) != before:
            return None
        return list(rendered.token_ids[len(before) :])


def _with_tool_names(messages: Sequence[TemplateMessage]) -> list[dict[str, Any]]:
    """Return the messages, those of tools with the name of the function whose call they answer."""
    names: dict[str, str] = {}
    named: list[dict[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id", "")] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        named.append({"name": name, **message} if message["role"] == "tool" and name else dict(message))
    return named


def _plain(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] if tools else None
