"""The ids that a chat template adds after a completion, proved to fit the ids that were sampled.

A conversation went `prompt P, completion C`; now the client sends new messages. Rendering everything anew would spell
the completion in other tokens. The verified delta asks the template only what comes *after* the completion:

1. X = T(M, generation prompt) is what was rendered for the parent call, Y = T(M + [A] + N, generation prompt) what the
   template makes of the whole; A is the bridge's own parse of the completion, never the client's echo.
2. Y must begin with X; the rest is the completion as the template writes it, its terminator, and the new messages.
3. The first terminator in the rest is where the model's turn ends. What the model sampled must have ended the same way;
   then the ids after the terminator (or from it on, where the completion was cut before it) are the delta D.

The next prompt is P + C + D. P and C are taken as they are, so nothing that was sampled can change; what is checked is
that D says what the template means by the new messages. Where that cannot be shown, `Refused` says why, and the caller
renders everything anew, as a new sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokentape.v1 import types_pb2
from tokentape_bridge.errors import ApiError
from tokentape_bridge.messages import TemplateMessage


class Refused(Exception):
    """A conversation cannot be continued; `cause` is the `SplitCause` for the tape."""

    def __init__(self, cause: types_pb2.SplitCause.ValueType, detail: str = "") -> None:
        """`detail` is for the log."""
        super().__init__(detail or types_pb2.SplitCause.Name(cause))
        self.cause = cause


class ChatText(Protocol):
    """What is needed of a tokenizer and its chat template."""

    def render_text(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any],
    ) -> str:
        """Return the template's text with the generation prompt. Raises `ApiError` where the template fails."""
        ...

    def shield(self, messages: Sequence[TemplateMessage]) -> tuple[list[TemplateMessage], Mapping[str, str]]:
        """Return the messages with special tokens' texts in them replaced by marks, and the text of each mark."""
        ...

    def encode_shielded(self, text: str, shields: Mapping[str, str]) -> list[int]:
        """Return the ids of `text`, its special tokens recognised, marks as the plain text that they stand for."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        ...

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts that the tokenizer takes for special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished call, as the conversation that is to be continued."""

    messages: Sequence[TemplateMessage]
    """M: what its prompt rendered."""
    answer: TemplateMessage
    """A: the parse of its completion."""
    completion_token_ids: Sequence[int]
    """C: what was sampled, the stop token included."""
    ended_by_token: bool
    """Whether it ended on a stop token, as against a limit or a stop string."""


def verified_delta(
    chat: ChatText,
    turn: Turn,
    new_messages: Sequence[TemplateMessage],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any],
    stop_token_ids: frozenset[int],
    keep_reasoning: bool = False,
) -> list[int]:
    """Return D, the ids that follow P + C. Raises `Refused`.

    `stop_token_ids` are the model's terminators. With `keep_reasoning`, a template that leaves the completion's
    reasoning out of the history is no reason to refuse: the sampled reasoning then stays in the prompt.
    """
    _check_messages(chat, turn.answer, new_messages)
    shielded, shields = chat.shield([*turn.messages, turn.answer, *new_messages])
    tail = _tail(chat, shielded[: len(turn.messages)], shielded, tools, template_arguments)
    reasoning = str(turn.answer.get("reasoning_content") or "").strip()
    if reasoning and reasoning not in tail and not keep_reasoning:
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_STRIPS_REASONING)
    delta = _after_terminator(chat.encode_shielded(tail, shields), turn, stop_token_ids)
    text = chat.decode(delta, skip_special_tokens=False)
    for message in new_messages:
        if str(message.get("content") or "").strip() not in text:
            raise Refused(types_pb2.SPLIT_CAUSE_MESSAGE_LOST, f"a {message.get('role')} message is not in the delta")
    return delta


def _check_messages(chat: ChatText, answer: TemplateMessage, new_messages: Sequence[TemplateMessage]) -> None:
    if any(message.get("role") == "assistant" for message in new_messages):
        raise Refused(types_pb2.SPLIT_CAUSE_ANSWER_INSERTED)
    spoken = json.dumps(answer, ensure_ascii=False)
    if any(text in spoken for text in chat.special_texts):
        raise Refused(types_pb2.SPLIT_CAUSE_SPECIAL_TOKEN_TEXT)


def _tail(
    chat: ChatText,
    earlier: Sequence[TemplateMessage],
    whole: Sequence[TemplateMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any],
) -> str:
    """Return Y[len(X):]."""
    try:
        before = chat.render_text(earlier, tools=tools, template_arguments=template_arguments)
        after = chat.render_text(whole, tools=tools, template_arguments=template_arguments)
    except ApiError as error:
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_ERROR, str(error)) from error
    if not after.startswith(before):
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_REWRITES_HISTORY)
    return after[len(before) :]


def _after_terminator(tail: Sequence[int], turn: Turn, stop_token_ids: frozenset[int]) -> list[int]:
    """Return what follows the completion in the tail's ids, where the completion ended as the template ends a turn."""
    completion = turn.completion_token_ids
    end = next((index for index, token_id in enumerate(tail) if token_id in stop_token_ids), None)
    if end is None:
        raise Refused(types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS, "the template ends the turn with no stop token")
    inside = completion[:-1] if turn.ended_by_token else completion
    if any(token_id in stop_token_ids for token_id in inside):
        raise Refused(types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS, "the completion holds a stop token inside")
    if not turn.ended_by_token:
        return list(tail[end:])
    if not completion or completion[-1] != tail[end]:
        raise Refused(types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS, "the completion ended on another stop token")
    return list(tail[end + 1 :])
