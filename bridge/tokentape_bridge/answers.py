"""What a completion says: reasoning, content and tool calls, read from its text.

The forms are those of the Hermes family, which Qwen3 and many others use: reasoning between `<think>` and `</think>`
(the prompt may have opened it), and each tool call as a JSON object between `<tool_call>` and `</tool_call>`. They are
read as text, so it does not matter whether a tokenizer has tokens of their own for them. Nothing is mended: what is not
well formed stays content, as the model wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tokentape_bridge.canonical import canonical
from tokentape_bridge.messages import TemplateMessage

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments_text` is the JSON text as the model wrote it, `arguments` its value."""

    name: str
    arguments: dict[str, Any]
    arguments_text: str


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


def parse_answer(text: str, *, with_tools: bool, reasoning_is_open: bool, with_reasoning: bool = True) -> Answer:
    """Read a completion's text, its stop token taken off.

    `with_tools`: whether tool calls are looked for. `reasoning_is_open`: whether the prompt ended within `<think>`.
    """
    reasoning = None
    if with_reasoning:
        reasoning, text = _split_reasoning(text, reasoning_is_open)
    if not with_tools:
        return Answer(text, reasoning)
    content, calls = _split_tool_calls(text)
    return Answer(content, reasoning, tuple(calls))


def reasoning_is_open(prompt_text: str) -> bool:
    """Whether a prompt's text ends within reasoning that it opened itself."""
    return prompt_text.rstrip().endswith(_THINK_OPEN)


def _split_reasoning(text: str, is_open: bool) -> tuple[str | None, str]:
    start = _SPACE.match(text)
    opened = text.startswith(_THINK_OPEN, start.end() if start else 0)
    if not opened and not is_open:
        return None, text
    inner = text[text.index(_THINK_OPEN) + len(_THINK_OPEN) :] if opened else text
    reasoning, _, rest = inner.partition(_THINK_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _split_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its well-formed calls, and those calls."""
    pieces: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find(_CALL_OPEN, position)) >= 0:
        found = _read_call(text, start + len(_CALL_OPEN))
        if found is None:
            pieces.append(text[position : start + len(_CALL_OPEN)])
            position = start + len(_CALL_OPEN)
            continue
        call, end = found
        pieces.append(text[position:start])
        calls.append(call)
        position = end
    pieces.append(text[position:])
    # The line breaks around a call are its frame, not content.
    content = "".join(pieces)
    return (content.strip("\n") if calls else content), calls


def _read_call(text: str, start: int) -> tuple[ToolCall, int] | None:
    """Read a call whose opening tag ends at `start`; return it and where its closing tag ends."""
    start = _skip_space(text, start)
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    closing = _skip_space(text, end)
    if not isinstance(value, dict) or not text.startswith(_CALL_CLOSE, closing):
        return None
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    written = _arguments_text(text[start:end]) or json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, cast("dict[str, Any]", arguments), written), closing + len(_CALL_CLOSE)


def _arguments_text(call: str) -> str | None:
    """Return the text of the value of the top-level key "arguments" in a JSON object, just as it is written.

    Of several such keys it is the last, as for a JSON parser.
    """
    written = None
    position = _skip_space(call, call.index("{") + 1)
    while position < len(call) and call[position] == '"':
        key, position = cast("tuple[str, int]", _decoder.raw_decode(call, position))
        start = _skip_space(call, _skip_space(call, position) + 1)
        _, position = _decoder.raw_decode(call, start)
        if key == "arguments":
            written = call[start:position]
        position = _skip_space(call, _skip_space(call, position) + 1)
    return written


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
