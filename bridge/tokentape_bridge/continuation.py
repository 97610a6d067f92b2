"""From a conversation to the prompt of a call: the continuation of an earlier call where that can be proved.

Where `parents` finds the call that gave the last answer, only the ids that follow its completion travel: as a verified
delta, or as the model family's own renderer bridges turns. In every other case the whole conversation is rendered, and
the tape learns why, as a `SplitCause`. Nothing is remembered between requests, so any bridge continues any tape.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape.v1.tape_pb2 import FindCallsRequest
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.families import Family
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.parents import Conversation, FindCalls, Parent, SplitCause, find_parent
from tokentape_bridge.reasoning import Reasoning, reasoning_of, to_text, with_recorded
from tokentape_bridge.text_stream import ended_by_token
from tokentape_bridge.verified_delta import Refused, Turn, check_messages_kept, verified_delta

_logger = logging.getLogger(__name__)

_TEMPLATE_CANNOT_TELL = (
    types_pb2.SPLIT_CAUSE_TEMPLATE_ERROR,
    types_pb2.SPLIT_CAUSE_TEMPLATE_REWRITES_HISTORY,
    types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS,
    types_pb2.SPLIT_CAUSE_MESSAGE_LOST,
    types_pb2.SPLIT_CAUSE_SPECIAL_TOKEN_TEXT,
)
"""Why a verified delta may fail where code made for the family need not."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a call. With a parent, `token_ids` are those that follow the parent's."""

    token_ids: list[int]
    parent: types_pb2.CallReference | None = None
    parent_token_ids: Sequence[int] = ()
    """The parent's prompt and completion, where they were wanted."""
    parent_reasoning: Reasoning | None = None
    """The reasoning that these have."""
    split_cause: SplitCause = types_pb2.SPLIT_CAUSE_UNSPECIFIED

    def put_into(self, call: GenerateRequest, conversation: Conversation) -> None:
        """Make it the prompt of `call`, with what a later request needs to find the call."""
        call.prompt_token_ids.extend(self.token_ids)
        call.anchor = conversation.anchor
        reasoning = reasoning_of(conversation.messages) if self.parent_reasoning is None else self.parent_reasoning
        call.context_fingerprint = ".".join(filter(None, (conversation.context, to_text(reasoning))))
        if self.parent is not None:
            call.parent.CopyFrom(self.parent)
        else:
            call.split_cause = self.split_cause

    @property
    def whole(self) -> list[int]:
        """All ids of the prompt; with a parent, only where its ids were wanted."""
        return [*self.parent_token_ids, *self.token_ids]


async def continue_or_render(
    chat: ChatModel, conversation: Conversation, find_calls: FindCalls | None, *, tape_id: str, with_whole: bool
) -> Prompt:
    """Return the prompt for `conversation` on a tape.

    `find_calls` is `None` where continuation is off. `with_whole`: whether the caller wants all ids of the prompt, not
    only the new ones. Raises `ApiError` where the template refuses the messages.
    """
    try:
        if find_calls is None:
            raise Refused(types_pb2.SPLIT_CAUSE_CONTINUATION_OFF)
        if conversation.continue_final_message:
            # The agent wrote the beginning of an answer: nothing proves that its ids are what a call sampled.
            raise Refused(types_pb2.SPLIT_CAUSE_HISTORY_EDITED)
        parent = await find_parent(chat, conversation, find_calls, tape_id=tape_id, with_prompt=with_whole)
        delta = await _continue(chat, conversation, parent, find_calls, tape_id)
    except Refused as refusal:
        if refusal.cause != types_pb2.SPLIT_CAUSE_NEW_CONVERSATION:
            # Whoever has a tape's id may write to it.
            tape = hashlib.sha256(tape_id.encode()).hexdigest()[:8]
            _logger.info("a new sample begins on a tape (SHA-256 of its id: %s): %s", tape, refusal)
        return Prompt(await asyncio.to_thread(chat.render, conversation), split_cause=refusal.cause)
    return Prompt(
        delta,
        parent=parent.reference,
        parent_token_ids=[*parent.call.prompt_token_ids, *parent.token_ids],
        parent_reasoning=parent.reasoning_with_answer(conversation.answers[0]),
    )


async def _continue(
    chat: ChatModel, conversation: Conversation, parent: Parent, find_calls: FindCalls, tape_id: str
) -> list[int]:
    """Return the ids that follow the parent's: the verified delta, else the family's. Raises `Refused`."""
    if chat.tokenizer.has_template:
        try:
            return await asyncio.to_thread(_delta, chat, conversation, parent)
        except Refused as refusal:
            if chat.family is None or refusal.cause not in _TEMPLATE_CANNOT_TELL:
                raise
    if chat.family is None or not conversation.add_generation_prompt:
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_ERROR)
    # Only the family's renderer needs the whole prompt, and only here.
    prompt = parent.call.prompt_token_ids or await _prompt_of(parent, find_calls, tape_id)
    return await asyncio.to_thread(_bridged, chat, chat.family, conversation, parent, prompt)


async def _prompt_of(parent: Parent, find_calls: FindCalls, tape_id: str) -> Sequence[int]:
    found = await find_calls(FindCallsRequest(tape_id=tape_id, anchors=[parent.call.anchor], include_prompts=True))
    return next(call.prompt_token_ids for call in found.calls if call.call_id == parent.call.call_id)


def _delta(chat: ChatModel, conversation: Conversation, parent: Parent) -> list[int]:
    last = conversation.answers[0]
    turn = Turn(
        messages=with_recorded(conversation.messages[:last], parent.prompt_reasoning),
        answer=parent.answer.as_template_message(),
        completion_token_ids=parent.token_ids,
        ended_by_token=ended_by_token(parent.completion),
    )
    new_messages = conversation.messages[last + 1 :]
    return verified_delta(chat, turn, new_messages, conversation.frame, keep_reasoning=parent.keep_reasoning)


def _bridged(
    chat: ChatModel, family: Family, conversation: Conversation, parent: Parent, prompt_token_ids: Sequence[int]
) -> list[int]:
    """Return the ids that the family's renderer puts after the parent's. Raises `Refused`."""
    last = conversation.answers[0]

    def bridge(
        messages: Sequence[TemplateMessage], *, keep_reasoning: bool = parent.keep_reasoning
    ) -> list[int] | None:
        return family.bridge_turns(
            prompt_token_ids,
            parent.token_ids,
            messages,
            last,
            tools=conversation.tools,
            keep_reasoning=keep_reasoning,
        )

    delta = bridge(conversation.messages)
    if delta is None:
        strips = not parent.keep_reasoning and bridge(conversation.messages, keep_reasoning=True) is not None
        raise Refused(
            types_pb2.SPLIT_CAUSE_TEMPLATE_STRIPS_REASONING if strips else types_pb2.SPLIT_CAUSE_TERMINATOR_DIFFERS,
            "the family's renderer does not bridge this turn",
        )
    new_messages = conversation.messages[last + 1 :]
    check_messages_kept(chat, delta, new_messages)
    if chat.spells_special_token(new_messages):
        # With other words in their place there are as many special tokens, unless these were taken for some.
        other = bridge(chat.shield(conversation.messages, None)[0]) or ()
        if [i for i in other if i in chat.added_token_ids] != [i for i in delta if i in chat.added_token_ids]:
            raise Refused(types_pb2.SPLIT_CAUSE_SPECIAL_TOKEN_TEXT)
    return delta
