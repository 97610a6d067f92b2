"""From a conversation to the prompt of a call: the continuation of an earlier call where that can be proved.

Each call on a tape records the fingerprint of its conversation. A request whose history ends, before its new messages,
in an answer is a continuation if the tape has a call that

1. was asked the conversation before that answer, or has the very ids that the client echoes; and
2. gave that answer, by the bridge's own parse of its completion.

Then only the ids that follow the completion travel: as a verified delta, or as the model family's own renderer bridges
turns. In every other case the whole conversation is rendered, and the tape learns why, as a `SplitCause`. Nothing is
remembered between requests, so any bridge continues any tape.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokentape.v1 import types_pb2
from tokentape.v1.tape_pb2 import FindCallsRequest, FindCallsResponse
from tokentape_bridge.anchors import anchor, context_fingerprint
from tokentape_bridge.chat_model import ChatModel, ended_by_token
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.verified_delta import Refused, Turn, verified_delta

_logger = logging.getLogger(__name__)

FindCalls = Callable[[FindCallsRequest], Awaitable[FindCallsResponse]]
"""`TapeService.FindCalls`."""

SplitCause = types_pb2.SplitCause.ValueType
_FoundCall = FindCallsResponse.FoundCall

_COMPLETE = (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_REPETITION)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request would have the model continue."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]] | None
    template_arguments: Mapping[str, Any]
    add_generation_prompt: bool = True
    """Whether the prompt ends with the opening of the model's answer."""
    echoed_token_ids: Sequence[int] = ()
    """Prompt and completion of the call that gave the last answer, as the client echoes them; empty: it does not."""

    @property
    def anchor(self) -> str:
        """The fingerprint of the messages."""
        return anchor(self.messages)

    @property
    def context(self) -> str:
        """The fingerprint of tools and template arguments."""
        return context_fingerprint(self.tools, self.template_arguments)

    @property
    def answers(self) -> list[int]:
        """Where assistant messages stand, the last first."""
        return [i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "assistant"]

    def before(self, index: int) -> Conversation:
        """Return the conversation up to the message at `index`."""
        return Conversation(self.messages[:index], self.tools, self.template_arguments)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a call. With a parent, `token_ids` are those that follow the parent's."""

    token_ids: list[int]
    parent: types_pb2.CallReference | None = None
    parent_token_ids: Sequence[int] = ()
    """The parent's prompt and completion, where they were wanted."""
    split_cause: SplitCause = types_pb2.SPLIT_CAUSE_UNSPECIFIED

    @property
    def whole(self) -> list[int]:
        """All ids of the prompt; with a parent, only where its ids were wanted."""
        return [*self.parent_token_ids, *self.token_ids]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A completion that may have given the last answer."""

    call: _FoundCall
    choice: int
    keep_reasoning: bool
    """Whether the tape wants sampled reasoning kept where the template would leave it out."""

    @property
    def token_ids(self) -> Sequence[int]:
        return self.call.choices[self.choice].token_ids

    @property
    def completion(self) -> types_pb2.Completion | None:
        """How it ended; None where it has not, or its call failed."""
        choice = self.call.choices[self.choice]
        return choice.completion if choice.HasField("completion") else None


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
        candidate = await _find_parent(chat, conversation, find_calls, tape_id, with_whole)
        delta = await _continue(chat, conversation, candidate, find_calls, tape_id)
    except Refused as refusal:
        if refusal.cause != types_pb2.SPLIT_CAUSE_NEW_CONVERSATION:
            _logger.info("a new sample begins on tape %s: %s", tape_id, refusal)
        return Prompt(await asyncio.to_thread(chat.render, conversation), split_cause=refusal.cause)
    return Prompt(
        delta,
        parent=types_pb2.CallReference(call_id=candidate.call.call_id, choice=candidate.choice),
        parent_token_ids=[*candidate.call.prompt_token_ids, *candidate.token_ids],
    )


async def _find_parent(
    chat: ChatModel, conversation: Conversation, find_calls: FindCalls, tape_id: str, with_prompts: bool
) -> _Candidate:
    """Return the latest completion that gave the last answer of the conversation. Raises `Refused`."""
    answers = conversation.answers
    if not answers:
        raise Refused(types_pb2.SPLIT_CAUSE_NEW_CONVERSATION)
    before = conversation.before(answers[0])
    found = await find_calls(
        FindCallsRequest(
            tape_id=tape_id,
            anchors=[before.anchor],
            exact_token_ids=conversation.echoed_token_ids,
            include_prompts=with_prompts,
        )
    )
    candidate = _match(chat, before, conversation.messages[answers[0]], found)
    if candidate is None:
        raise Refused(await _why_unmatched(chat, conversation, find_calls, tape_id))
    if candidate.completion is None or candidate.completion.finish_reason not in _COMPLETE:
        raise Refused(types_pb2.SPLIT_CAUSE_PARENT_INCOMPLETE)
    _check_context(conversation, candidate.call)
    return candidate


def _match(chat: ChatModel, before: Conversation, echo: TemplateMessage, found: FindCallsResponse) -> _Candidate | None:
    """Return the latest completion found that says what `echo` says."""
    for call in reversed(found.calls):
        for index, choice in enumerate(call.choices):
            completion = choice.completion if choice.HasField("completion") else None
            # Whether its request let the model call tools is not known, so either reading of the text will do.
            if any(
                chat.parse(choice.token_ids, completion, before, with_tools=with_tools).equals(echo)
                for with_tools in (True, False)
            ):
                return _Candidate(call, index, found.keep_reasoning)
    return None


async def _why_unmatched(
    chat: ChatModel, conversation: Conversation, find_calls: FindCalls, tape_id: str
) -> SplitCause:
    """Say whether the last answer was put in after one that a call gave, or stands where a call's answer was."""
    earlier = {conversation.before(index).anchor: index for index in conversation.answers[1:]}
    found = await find_calls(FindCallsRequest(tape_id=tape_id, anchors=list(earlier)))
    for call in found.calls:
        index = earlier[call.anchor]
        if _match(chat, conversation.before(index), conversation.messages[index], FindCallsResponse(calls=[call])):
            return types_pb2.SPLIT_CAUSE_ANSWER_INSERTED
    return types_pb2.SPLIT_CAUSE_HISTORY_EDITED


def _check_context(conversation: Conversation, call: _FoundCall) -> None:
    tools, _, arguments = conversation.context.partition(".")
    recorded_tools, _, recorded_arguments = call.context_fingerprint.partition(".")
    if tools != recorded_tools:
        raise Refused(types_pb2.SPLIT_CAUSE_TOOLS_CHANGED)
    if arguments != recorded_arguments:
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_ARGUMENTS_CHANGED)


async def _continue(
    chat: ChatModel, conversation: Conversation, candidate: _Candidate, find_calls: FindCalls, tape_id: str
) -> list[int]:
    """Return the ids that follow the candidate's: the verified delta, else the family's. Raises `Refused`."""
    try:
        return await asyncio.to_thread(_delta, chat, conversation, candidate)
    except Refused:
        if not chat.bridges_turns:
            raise
        # Only the family's renderer needs the whole prompt, and only here.
        whole = await find_calls(
            FindCallsRequest(
                tape_id=tape_id,
                anchors=[candidate.call.anchor],
                exact_token_ids=conversation.echoed_token_ids,
                include_prompts=True,
            )
        )
        prompt = next(call.prompt_token_ids for call in whole.calls if call.call_id == candidate.call.call_id)
        new_messages = conversation.messages[conversation.answers[0] + 1 :]
        bridged = await asyncio.to_thread(
            chat.bridge_turns, prompt, candidate.token_ids, new_messages, conversation.tools
        )
        if bridged is None:
            raise
        return bridged


def _delta(chat: ChatModel, conversation: Conversation, candidate: _Candidate) -> list[int]:
    completion = candidate.completion
    assert completion is not None, "an incomplete candidate is no parent"
    last = conversation.answers[0]
    before, new_messages = conversation.before(last), conversation.messages[last + 1 :]
    answer = chat.parse(candidate.token_ids, completion, before, with_tools=True)
    return verified_delta(
        chat,
        Turn(
            messages=before.messages,
            answer=answer.as_template_message(),
            completion_token_ids=candidate.token_ids,
            ended_by_token=ended_by_token(completion),
        ),
        new_messages,
        tools=conversation.tools,
        template_arguments=conversation.template_arguments,
        stop_token_ids=chat.stop_token_ids,
        keep_reasoning=candidate.keep_reasoning,
    )
