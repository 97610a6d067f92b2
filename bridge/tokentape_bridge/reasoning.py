"""Which reasoning the prompt of a call was made from, as its tape remembers it.

Clients may leave reasoning out of the history, or send it: either must come to the same. So each call records where its
prompt has an answer's reasoning, and a fingerprint of that, beside its context's fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from tokentape_bridge.messages import TemplateMessage

Reasoning = Mapping[int, str]
"""By an answer's place among the messages, the fingerprint of its reasoning."""

_FIELD = "reasoning_content"


def fingerprint(reasoning: str | None) -> str:
    """Return the fingerprint of an answer's reasoning, space at its ends apart; empty where there is none."""
    text = (reasoning or "").strip()
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12] if text else ""


def reasoning_of(messages: Sequence[TemplateMessage]) -> Reasoning:
    """Return the reasoning that messages have."""
    found = {index: fingerprint(message.get(_FIELD)) for index, message in enumerate(messages)}
    return {index: digest for index, digest in found.items() if digest}


def is_edited(messages: Sequence[TemplateMessage], recorded: Reasoning) -> bool:
    """Whether messages have reasoning that is not what was recorded. Reasoning that is left out is no edit."""
    return any(recorded.get(index) != digest for index, digest in reasoning_of(messages).items())


def with_recorded(messages: Sequence[TemplateMessage], recorded: Reasoning) -> list[TemplateMessage]:
    """Return the messages with some reasoning where it was recorded, and none elsewhere, whatever the client sent."""
    return [
        {key: value for key, value in message.items() if key != _FIELD}
        | ({_FIELD: "reasoning"} if index in recorded else {})
        for index, message in enumerate(messages)
    ]


def to_text(reasoning: Reasoning) -> str:
    """Return it as text, for the tape."""
    return ",".join(f"{index}-{digest}" for index, digest in reasoning.items())


def from_text(text: str) -> Reasoning:
    """Read what `to_text` wrote."""
    entries = (entry.partition("-") for entry in text.split(",") if entry)
    return {int(index): digest for index, _, digest in entries if index.isdecimal()}
