"""Fingerprints of conversations, by which a later request finds the call that it continues.

A call records the fingerprint of its messages as its anchor, and that of its tools and template arguments beside it. A
client that continues the conversation sends those messages again, then the answer, then more; so the fingerprint of its
messages up to an answer is the anchor of the call that gave it. Any bridge computes the same, so that a restarted or a
second one continues the same tape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tokentape_bridge.canonical import canonical
from tokentape_bridge.messages import TemplateMessage

# Clients leave reasoning out of the history, and some renumber tool calls; neither makes it another conversation.
_IGNORED_FIELDS = frozenset({"reasoning_content", "tool_call_id"})


def anchor(messages: Sequence[TemplateMessage]) -> str:
    """Return the fingerprint of a conversation.

    Space at the ends of answers is no part of it, as it is none of `answers.Answer.equals`.
    """
    return _digest([_essence(message) for message in messages])


def context_fingerprint(tools: Sequence[Mapping[str, Any]] | None, template_arguments: Mapping[str, Any]) -> str:
    """Return the fingerprint of what else shapes a prompt, as `<tools>.<template arguments>`."""
    return f"{_digest(list(tools or []))}.{_digest(dict(template_arguments))}"


def _essence(message: TemplateMessage) -> TemplateMessage:
    kept = {key: value for key, value in message.items() if key not in _IGNORED_FIELDS}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [call["function"] for call in calls]
    if kept["role"] == "assistant":
        kept["content"] = str(kept["content"]).strip()
    return kept


def _digest(value: object) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:32]
