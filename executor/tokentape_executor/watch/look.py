"""How tokens look: their text, their ids or both; the colours of roles."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tokentape_executor.shades import shade, visible

MARKUP = "dim"
"""The style of a template's marks, of side remarks, and of what nobody said."""

_ROLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


class Ids(enum.Enum):
    """Where ids are shown."""

    NO = "no"
    BESIDE = "beside"
    INSTEAD = "instead"


@dataclass(frozen=True, slots=True)
class Look:
    """How a tape is shown."""

    ids: Ids = Ids.NO
    full: bool = False
    """Whether long prompts are shown whole."""


def role_style(role: str) -> str:
    """Return the style of a role's text."""
    return _ROLES.get(role, MARKUP)


def token_text(token_id: int, piece: str, ids: Ids) -> str:
    """Return what is shown of a token. One without text is shown by its id."""
    if ids is Ids.INSTEAD or not piece:
        return f"{token_id} "
    shown = visible(piece)
    if ids is Ids.NO:
        return shown
    # The id of a line break stays on its line.
    line = shown.rstrip("\n")
    return f"{line}⟨{token_id}⟩{shown[len(line) :]}"


def given_text(token_ids: Sequence[int], pieces: Sequence[str], style: str, ids: Ids) -> Text:
    """Return tokens that were given to the engine."""
    shown = (token_text(token_id, piece, ids) for token_id, piece in zip(token_ids, pieces, strict=True))
    return Text("".join(shown), style)


def sampled_text(token_ids: Sequence[int], pieces: Sequence[str], logprobs: Sequence[float], ids: Ids) -> Text:
    """Return sampled tokens, each in the colour of its probability."""
    text = Text()
    for token_id, piece, logprob in zip(token_ids, pieces, logprobs, strict=True):
        # A line break is a token too; let it be seen.
        text.append(token_text(token_id, piece, ids).replace("\n", "⏎\n"), shade(logprob))
    return text
