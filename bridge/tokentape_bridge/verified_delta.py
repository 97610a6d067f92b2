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
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        add_generation_prompt: bool,
    ) -> str:
        """Return the template's text. Raises `ApiError` where the template fails."""
        ...

    def shield(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[TemplateMessage], list[Mapping[str, Any]], Mapping[str, str]]:
        """Return messages and tools with special tokens' texts in them replaced by marks, and the text of each mark."""
        ...

    def encode_shielded(self, text: str, shields: Mapping[str, str]) -> list[int]:
        """Return the ids of `text`, its special tokens recognised, marks as the plain text that they stand for."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        ...

    def spells_special_token(self, value: object) -> bool:
        """Whether any text in a JSON value has that of a special token in it."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The model's terminators."""
        ...

    @property
    def added_token_ids(self) -> frozenset[int]:
        """The ids that stand for whole texts, whatever stands around them."""
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


@dataclass(frozen=True, slots=True)
class Frame:
    """What shapes a prompt beside its messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_generation_prompt: bool = True
    """Whether the prompt ends with the opening of the model's answer."""


def verified_delta(
    chat: ChatText, turn: Turn, new_messages: Sequence[TemplateMessage], frame: Frame, *, keep_reasoning: bool = False
) -> list[int]:
    """Return D, the ids that follow P + C. Raises `Refused`.

    With `keep_reasoning`, a template that leaves reasoning out of the history is no reason to refuse: the sampled
    reasoning then stays in the prompt.
    """
    if any(message.get("role") == "assistant" for message in new_messages):
        raise Refused(types_pb2.SPLIT_CAUSE_ANSWER_INSERTED)
    if chat.spells_special_token(turn.answer):
        raise Refused(types_pb2.SPLIT_CAUSE_SPECIAL_TOKEN_TEXT)
    shielded, tools, shields = chat.shield([*turn.messages, turn.answer, *new_messages], frame.tools)
    template = _Template(chat, Frame(tools, frame.template_arguments, frame.add_generation_prompt))
    tail = _tail(template, shielded, len(turn.messages), keep_reasoning=keep_reasoning)
    delta = _after_terminator(chat, chat.encode_shielded(tail, shields), turn)
    check_messages_kept(chat, delta, new_messages)
    return delta


def check_messages_kept(chat: ChatText, delta: Sequence[int], new_messages: Sequence[TemplateMessage]) -> None:
    """Raise `Refused` unless the texts of the new messages, as they are or as JSON strings, are in the delta in order.

    No two may be the same place of it.
    """
    text = chat.decode(delta, skip_special_tokens=False)
    position = 0
    for message in new_messages:
        content = str(message.get("content") or "").strip()
        forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])
        end = _end_of_first(text, forms, position)
        if end is None:
            # Some tokenizers normalise text: what they make of the message is what must be there.
            made = [chat.decode(chat.encode_shielded(form, {}), skip_special_tokens=False).strip() for form in forms]
            end = _end_of_first(text, made, position)
        if end is None:
            raise Refused(types_pb2.SPLIT_CAUSE_MESSAGE_LOST, f"a {message.get('role')} message is not in the delta")
        position = end


def _end_of_first(text: str, forms: Sequence[str], start: int) -> int | None:
    """Return where the first of the forms ends that is in the text from `start` on."""
    places = ((text.find(form, start), form) for form in forms)
    return min((place + len(form) for place, form in places if place >= 0), default=None)


@dataclass(frozen=True, slots=True)
class _Template:
    """The chat template with its frame."""

    chat: ChatText
    frame: Frame

    def text_after(
        self, earlier: Sequence[TemplateMessage], whole: Sequence[TemplateMessage], *, generation_prompt: bool
    ) -> str | None:
        """Return what the text of `whole` has after that of `earlier`; `None` where it does not begin with it.

        `generation_prompt`: whether the text of `earlier` ends with the opening of an answer. Raises `Refused` where
        the template fails.
        """
        try:
            before = self._render(earlier, generation_prompt)
            after = self._render(whole, self.frame.add_generation_prompt)
        except ApiError as error:
            raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_ERROR, str(error)) from error
        return after[len(before) :] if after.startswith(before) else None

    def _render(self, messages: Sequence[TemplateMessage], generation_prompt: bool) -> str:
        return self.chat.render_text(
            messages,
            tools=self.frame.tools,
            template_arguments=self.frame.template_arguments,
            add_generation_prompt=generation_prompt,
        )


def _tail(template: _Template, whole: Sequence[TemplateMessage], count: int, *, keep_reasoning: bool) -> str:
    """Return the template's text from the completion on, Y[len(X):]; `whole` is M + [A] + N, M its first `count`.

    How it spells the answer's reasoning may differ, but comes before the terminator, and so never into the delta.
    """
    answer = whole[count]
    # A text that occurs nowhere else shows whether the template writes the answer's reasoning.
    mark = secrets.token_hex(8)
    marked = {**answer, "reasoning_content": mark} if answer.get("reasoning_content") else answer
    tail = template.text_after(
        whole[:count],
        [*whole[:count], marked, *whole[count + 1 :]],
        generation_prompt=template.frame.add_generation_prompt,
    )
    if tail is not None and (marked is answer or mark in tail):
        return tail
    # Without any reasoning, and without the opening that may begin one: is the rest of the history as it was?
    bare = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in whole]
    tail = template.text_after(bare[:count], bare, generation_prompt=False)
    if tail is None:
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_REWRITES_HISTORY)
    if not keep_reasoning:
        reasons = any("reasoning_content" in message for message in whole)
        raise Refused(
            types_pb2.SPLIT_CAUSE_TEMPLATE_STRIPS_REASONING
            if reasons
            else types_pb2.SPLIT_CAUSE_TEMPLATE_REWRITES_HISTORY
        )
    return tail


def _after_terminator(chat: ChatText, tail: Sequence[int], turn: Turn) -> list[int]:
    """Return what follows the completion in the tail's ids, where the completion ended as the template ends a turn."""
    completion, terminators = turn.completion_token_ids, chat.stop_token_ids
    end = next((index for index, token_id in enumerate(tail) if token_id in terminators), None)
    # An ordinary token may be part of the answer's own text.
    if end is None or tail[end] not in chat.added_token_ids:
        raise Refused(types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS, "the template ends the turn with no stop token")
    inside = completion[:-1] if turn.ended_by_token else completion
    if any(token_id in terminators for token_id in inside):
        raise Refused(types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS, "the completion holds a stop token inside")
    if not turn.ended_by_token:
        return list(tail[end:])
    if not completion or completion[-1] != tail[end]:
        raise Refused(types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS, "the completion ended on another stop token")
    return list(tail[end + 1 :])
