"""What a completion says: reasoning, content and tool calls, and whether a client's echo says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tokentape_bridge.canonical import canonical
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed completion; `reasoning` is `None` where there is none."""

    content: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()

    def as_template_message(self) -> TemplateMessage:
        """Return the answer as a chat template takes it."""
        message: TemplateMessage = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    def equals(self, echo: TemplateMessage) -> bool:
        """Whether a client's echo is this answer: the same content, but for space at its ends, and the same calls.

        Arguments are compared as values. Reasoning may be missing from an echo, but not differ.
        """
        reasoning = echo.get("reasoning_content")
        calls = cast("list[dict[str, Any]]", echo.get("tool_calls") or [])
        return (
            str(echo.get("content") or "").strip() == self.content.strip()
            and (not reasoning or reasoning.strip() == (self.reasoning or "").strip())
            and [(call["function"]["name"], canonical(call["function"]["arguments"])) for call in calls]
            == [(call.name, canonical(call.arguments)) for call in self.tool_calls]
        )

    def with_first_call_only(self) -> Answer:
        """Return the answer as a client sees it that wants one call at a time (`parallel_tool_calls: false`)."""
        return replace(self, tool_calls=self.tool_calls[:1])
