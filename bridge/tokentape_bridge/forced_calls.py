"""`tool_choice` "required" or a named function, enforced while sampling: a structural tag in XGrammar's format.

The form is the one that `answers` reads: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`. The
engine masks every token that would leave it, so that what comes back is a call with arguments that fit its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokentape_bridge.errors import ApiError

_LONGEST_SPACE = 32
"""Most white space in a row, in characters: a line break and an indentation. Small models that may write more of it
were seen to write line breaks until their tokens ended."""


def forced_function(tool_choice: object) -> str | None:
    """Return the function that `tool_choice` names, if it names one. Raises `ApiError` for what is no tool choice."""
    if tool_choice in (None, "auto", "none", "required"):
        return None
    if isinstance(tool_choice, dict):
        choice = cast("dict[str, Any]", tool_choice)
        if choice.get("type") in ("allowed_tools", "custom"):
            raise ApiError(
                f'tool_choice: the type "{choice["type"]}" is not supported; give only the tools that may be called',
                param="tool_choice",
                code="unsupported_parameter",
            )
        function = choice.get("function")
        name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return name
    raise ApiError(
        'tool_choice: must be "auto", "none", "required" or {"type": "function", "function": {"name": …}}',
        param="tool_choice",
        code="invalid_value",
    )


def structural_tag(tools: Sequence[Mapping[str, Any]] | None, tool_choice: object, *, parallel: bool) -> str | None:
    """Return the structural tag that enforces `tool_choice`, as JSON text; `None` where nothing is enforced.

    With `parallel`, any number of calls may follow each other. Raises `ApiError` where there is no tool to call.
    """
    name = forced_function(tool_choice)
    if name is None and tool_choice != "required":
        return None
    described: list[object] = [tool.get("function") for tool in tools or ()]
    functions = [cast("Mapping[str, Any]", function) for function in described if isinstance(function, dict)]
    allowed = [function for function in functions if name in (None, function.get("name"))]
    if not allowed:
        problem = f"there is no tool {name[:80]!a}" if name else '"required" needs tools'
        raise ApiError(f"tool_choice: {problem}", param="tool_choice", code="invalid_value")
    form = {
        "type": "tags_with_separator",
        "tags": [_tag(function) for function in allowed],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return json.dumps({"type": "structural_tag", "format": form})


def _tag(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _LONGEST_SPACE},
        "end": "}\n</tool_call>",
    }
