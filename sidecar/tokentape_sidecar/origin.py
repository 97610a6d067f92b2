"""What a call's client said of its prompt: where it comes from, and why it has no parent if it has none."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SplitCause(enum.Enum):
    """Why a call has no parent; the same causes as `tokentape.v1.SplitCause`, whose numbers these are."""

    UNSPECIFIED = 0
    NEW_CONVERSATION = 1
    HISTORY_EDITED = 2
    ANSWER_INSERTED = 3
    TOOLS_CHANGED = 4
    TEMPLATE_ARGUMENTS_CHANGED = 5
    SPECIAL_TOKEN_TEXT = 6
    TEMPLATE_ERROR = 7
    TEMPLATE_REWRITES_HISTORY = 8
    TEMPLATE_STRIPS_REASONING = 9
    TERMINATOR_DIFFERS = 10
    MESSAGE_LOST = 11
    PARENT_INCOMPLETE = 12
    CONTINUATION_OFF = 13
    LORA_CHANGED = 14


@dataclass(frozen=True, slots=True)
class Origin:
    """What a call's client said of the prompt. Opaque to the sidecar but for telling it on."""

    anchor: str = ""
    context_fingerprint: str = ""
    split_cause: SplitCause = SplitCause.UNSPECIFIED
