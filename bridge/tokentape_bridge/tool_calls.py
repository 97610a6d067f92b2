"""Tool calls as text: a JSON object with name and arguments between `<tool_call>` and `</tool_call>`.

What a text says is settled from left to right, so that the same is read from a text that is still growing: `read_call`
says when it cannot tell yet.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

_SPACE = re.compile(r"\s*")
_QUOTE_OR_CLOSE = re.compile(f'"|{CALL_CLOSE}')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""JSON can spell it, UTF-8 cannot."""
_LONGEST_LEXEME = len(r"\ud83d\ude00")
"""The most characters at the end of a growing text that are wrong only as long as the rest of them is missing."""

_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments_text` is the JSON text as the model wrote it, `arguments` its value."""

    name: str
    arguments: dict[str, Any]
    arguments_text: str


class UndecidedError(Exception):
    """What follows decides whether this is a call."""


def read_call(text: str, start: int) -> tuple[ToolCall, int] | None:
    """Read a call whose opening tag ends at `start`; return it and where its closing tag ends.

    `None`: there is no well-formed call, whatever may follow. Raises `UndecidedError`.
    """
    start = _skip_space(text, start)
    if start == len(text):
        raise UndecidedError
    if text[start] != "{":
        return None
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos > len(text) - _LONGEST_LEXEME:
            raise UndecidedError from None
        return None
    except (ValueError, RecursionError):
        return None
    closing = _skip_space(text, end)
    if not text.startswith(CALL_CLOSE, closing):
        if CALL_CLOSE.startswith(text[closing:]):
            raise UndecidedError
        return None
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or _LONE_SURROGATE.search(name) or not isinstance(arguments, dict):
        return None
    written = _arguments_text(text[start:end]) or json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, cast("dict[str, Any]", arguments), written), closing + len(CALL_CLOSE)


class CloseSearch:
    """Looks for a closing tag outside of JSON strings in a growing text, each character of which is looked at once."""

    def __init__(self, position: int) -> None:
        """`position` is where the opening tag ends."""
        self._position = position
        self._in_string = False

    def reaches_close(self, text: str) -> bool:
        """Whether `text`, which has grown since the last time, has such a tag."""
        while match := (_QUOTE_OR_ESCAPE if self._in_string else _QUOTE_OR_CLOSE).search(text, self._position):
            self._position = match.end()
            if match[0] == CALL_CLOSE:
                return True
            if match[0] == "\\":
                self._position += 1
            else:
                self._in_string = not self._in_string
        unseen = 0 if self._in_string else len(CALL_CLOSE) - 1
        self._position = max(self._position, len(text) - unseen)
        return False


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
