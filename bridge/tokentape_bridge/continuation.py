"""From a conversation to the prompt of a call: the continuation of an earlier call where that can be proved.

Each call on a tape records the fingerprint of its conversation. A request whose history ends, before its new messages,
in an answer is a continuation if the tape has a call that (1) had the conversation before that answer, or has the very
ids that the client echoes, and (2) gave that answer, by the bridge's own parse of its completion. Then only the ids that
follow the completion travel (`verified_delta`). In every other case the whole conversation is rendered, and the tape
learns why: the `SplitCause`. Nothing is remembered between requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokentape.v1 import types_pb2
from tokentape.v1.tape_pb2 import FindCallsRequest, FindCallsResponse
from tokentape_bridge.anchors import anchor, context_fingerprint
from tokentape_bridge.answers import Answer
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.verified_delta import Refused, Turn, verified_delta

SplitCause = types_pb2.SplitCause.ValueType
FoundCall = FindCallsResponse.FoundCall
FoundChoice = FindCallsResponse.FoundChoice

_ENDED_WELL = (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_REPETITION)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request would have the model continue."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]] | None
    template_arguments: Mapping[str, Any]
    echoed_token_ids: Sequence[int] = ()
    """Prompt and completion of the call that gave the last answer, as the client echoes them; empty: it does not."""
    keep_reasoning: bool = False
    """Whether sampled reasoning stays in the prompt where the template would leave it out."""

    @property
    def last_answer(self) -> int | None:
        """Where the last assistant message stands."""
        return next((i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "assistant"), None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a call. With a parent, `token_ids` are those that follow it."""

    token_ids: list[int]
    parent: types_pb2.CallReference | None = None
    parent_token_ids: Sequence[int] = ()
    """The parent's prompt and completion, where the request wanted them."""
    split_cause: SplitCause = types_pb2.SPLIT_CAUSE_UNSPECIFIED
    anchor: str = ""
    context_fingerprint: str = ""

    @property
    def whole(self) -> list[int]:
        """All ids of the prompt, where `parent_token_ids` were wanted."""
        return [*self.parent_token_ids, *self.token_ids]


class Chat(Protocol):
    """A model's way with text: what the continuation needs of it."""

    def render(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation with the generation prompt."""
        ...

    def parse(self, token_ids: Sequence[int], completion: types_pb2.Completion, conversation: Conversation) -> Answer:
        """Return what a completion says that was sampled after `conversation`."""
        ...
