"""Whose turn each part of a prompt is, as far as the chat template's special tokens tell.

A mark counts only where it is made of the tokens that a template writes it with: a user who spells `<|im_start|>` in a
question begins no turn. A template that is not known gives one turn of no role.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

_ROLES = {"human": "user", "model": "assistant", "ipython": "tool", "observation": "tool", "developer": "system"}
"""Other names of the roles."""

_NAMED = (
    r"<\|im_start\|>(?P<chatml>\w+)",
    r"<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>",
    r"<start_of_turn>(?P<gemma>\w+)",
    r"<\|start\|>(?P<harmony>\w+)",
    r"<\uff5c(?P<deepseek>User|Assistant)\uff5c>",
    r"<\|(?P<phi>system|user|assistant|tool|observation)\|>",
    r"\[/?(?P<mistral>INST)\]",
)
_MARK = re.compile("|".join(_NAMED))
_TOOL_RESULT = re.compile(r"\s*<tool_response>|\s*<tool_output>")


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens `[start, end)` of a prompt."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or what the template calls it; empty: what comes before the first mark."""
    start: int
    end: int
    mark_count: int
    """How many of its tokens, the first ones, are the mark that begins it, and the line breaks after that."""


def turns_of(pieces: Sequence[str]) -> list[Turn]:
    """Return the turns of the tokens that have these texts: in order, none empty, together all of them."""
    if not pieces:
        return []
    text = "".join(pieces)
    starts = {offset: index for index, offset in enumerate(accumulate(map(len, pieces), initial=0))}
    begun = [(0, 0, ""), *_marks(text, pieces, starts)]
    ends = [*(start for start, _, _ in begun[1:]), len(pieces)]
    return [
        Turn(_role(role, "".join(pieces[start + marks : end])), start, end, marks)
        for (start, marks, role), end in zip(begun, ends, strict=True)
        if end > start
    ]


def _marks(text: str, pieces: Sequence[str], starts: dict[int, int]) -> Iterator[tuple[int, int, str]]:
    """Yield first token, number of tokens, and role of each mark."""
    for found in _MARK.finditer(text):
        first, end = starts.get(found.start()), starts.get(found.end())
        special = re.match(r"<[^>]*>|\[[^]]*\]", found[0])
        if first is None or end is None or special is None or pieces[first] != special[0]:
            continue
        role = found[found.lastgroup or 0].lower()
        if role == "inst":
            role = "user" if not found[0].startswith("[/") else "assistant"
        while end < len(pieces) and pieces[end].strip("\n") == "" != pieces[end]:
            end += 1
        yield first, end - first, _ROLES.get(role, role)


def _role(role: str, content: str) -> str:
    """Return the role, a tool's results being recognised where the template gives them to the user."""
    return "tool" if role == "user" and _TOOL_RESULT.match(content) else role
