"""Model families of the `renderers` package: reading completions and bridging turns by code made for one family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from tokentape_bridge.answers import Answer, ToolCall
from tokentape_bridge.messages import TemplateMessage


class FamilyError(Exception):
    """There is no such family, or it does not fit the tokenizer."""


class _Renderer(Protocol):
    """What is used of `renderers.Renderer`, typed."""

    def render_ids(self, messages: list[Any], *, tools: Any, add_generation_prompt: bool) -> list[int]: ...
    def parse_response(self, token_ids: list[int], *, tools: list[Any] | None) -> Any: ...
    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: list[Any], *, tools: Any
    ) -> Any: ...


class Family:
    """One family's renderer over one tokenizer."""

    def __init__(self, renderer: _Renderer) -> None:
        """Use `load`."""
        self._renderer = renderer

    @classmethod
    def load(cls, name: str, tokenizer: object) -> Family:
        """Return the family `name` ("qwen3", "gpt-oss", …) for a transformers tokenizer. Raises `FamilyError`."""
        import renderers  # noqa: PLC0415 - takes a second, and most bridges need none

        try:
            config = cast("renderers.RendererConfig", renderers.config_from_name(name))
            return cls(cast("_Renderer", renderers.create_renderer(tokenizer, config)))
        except Exception as error:
            raise FamilyError(f"the renderer {name!r} cannot be used: {error}") from error

    def render(self, messages: Sequence[TemplateMessage], *, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return the ids of a whole conversation with the generation prompt."""
        plain = [dict(message) for message in messages]
        return list(self._renderer.render_ids(plain, tools=_plain(tools), add_generation_prompt=True))

    def parse(self, token_ids: Sequence[int], *, tools: Sequence[Mapping[str, Any]] | None) -> Answer:
        """Return what a completion says; only calls that the renderer found well formed are calls."""
        parsed = self._renderer.parse_response(list(token_ids), tools=_plain(tools))
        calls = [
            ToolCall(call.name, cast("dict[str, Any]", call.arguments), json.dumps(call.arguments, ensure_ascii=False))
            for call in parsed.tool_calls
            if call.status == "ok" and isinstance(call.arguments, dict)
        ]
        return Answer(parsed.content, parsed.reasoning_content, tuple(calls) if tools else ())

    def bridge_turns(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int] | None:
        """Return prompt, completion and what follows them, as the renderer has it; `None` where it refuses."""
        rendered = self._renderer.bridge_to_next_turn(
            list(prompt_token_ids),
            list(completion_token_ids),
            [dict(message) for message in new_messages],
            tools=_plain(tools),
        )
        return None if rendered is None else list(rendered.token_ids)


def _plain(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] if tools else None
