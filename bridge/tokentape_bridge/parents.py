"""Which call of a tape gave the last answer of a conversation.

Each call on a tape records the fingerprint of its conversation as its anchor. A call is the parent of a request if it
was asked the conversation before the last answer, and gave that answer, by the bridge's own parse of its completion.
Several calls may have: then the one whose very ids the client echoes, else the latest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from tokentape.v1 import types_pb2
from tokentape.v1.tape_pb2 import FindCallsRequest, FindCallsResponse
from tokentape_bridge.anchors import anchor, context_fingerprint
from tokentape_bridge.answers import Answer
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.messages import TemplateMessage
from tokentape_bridge.reasoning import Reasoning, fingerprint, from_text, is_edited
from tokentape_bridge.verified_delta import Frame, Refused

_logger = logging.getLogger(__name__)

FindCalls = Callable[[FindCallsRequest], Awaitable[FindCallsResponse]]
"""`TapeService.FindCalls`."""

SplitCause = types_pb2.SplitCause.ValueType
_FoundCall = FindCallsResponse.FoundCall

_UINT32_MAX = 2**32 - 1
_COMPLETE = (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_REPETITION)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request would have the model continue."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]] | None
    template_arguments: Mapping[str, Any]
    add_generation_prompt: bool = True
    """Whether the prompt ends with the opening of the model's answer."""
    continue_final_message: bool = False
    """Whether the last message, the assistant's, is left open for the model to write on; then there is no opening."""
    lora_name: str = ""
    """The adapter that is to sample the answer; empty: the base model."""
    echoed_token_ids: Sequence[int] = ()
    """Prompt and completion of the call that gave the last answer, as the client echoes them; empty: it does not."""

    @property
    def anchor(self) -> str:
        """The fingerprint of the messages."""
        return anchor(self.messages)

    @property
    def context(self) -> str:
        """The fingerprint of tools and template arguments."""
        arguments = dict(self.template_arguments)
        if not self.add_generation_prompt:
            # No template argument can have this name.
            arguments["add_generation_prompt"] = False
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        return context_fingerprint(self.tools, arguments)

    @property
    def frame(self) -> Frame:
        """What shapes its prompts beside the messages."""
        return Frame(self.tools, self.template_arguments, self.add_generation_prompt)

    @property
    def answers(self) -> list[int]:
        """Where assistant messages stand, the last first."""
        return [i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "assistant"]

    def before(self, index: int) -> Conversation:
        """Return the conversation up to the message at `index`."""
        return Conversation(self.messages[:index], self.tools, self.template_arguments, self.add_generation_prompt)


@dataclass(frozen=True, slots=True)
class Parent:
    """A completion that gave the last answer."""

    call: _FoundCall
    choice: int
    answer: Answer
    """What it says, as the client echoes it."""
    completion: types_pb2.Completion
    """How it ended."""
    keep_reasoning: bool
    """Whether the tape wants sampled reasoning kept where the template would leave it out."""

    @property
    def prompt_reasoning(self) -> Reasoning:
        """The reasoning that its prompt has."""
        return _recorded(self.call)[2]

    def reasoning_with_answer(self, index: int) -> Reasoning:
        """Return that and its answer's, which stands at `index`."""
        digest = fingerprint(self.answer.reasoning)
        return {**self.prompt_reasoning, index: digest} if digest else self.prompt_reasoning

    @property
    def token_ids(self) -> Sequence[int]:
        """The completion."""
        return self.call.choices[self.choice].token_ids

    @property
    def reference(self) -> types_pb2.CallReference:
        """Its place on the tape."""
        return types_pb2.CallReference(call_id=self.call.call_id, choice=self.choice)


async def find_parent(
    chat: ChatModel, conversation: Conversation, find_calls: FindCalls, *, tape_id: str, with_prompt: bool
) -> Parent:
    """Return the completion that gave the last answer of `conversation`. Raises `Refused`.

    `with_prompt`: whether its call's prompt is wanted.
    """
    answers = conversation.answers
    if not answers:
        raise Refused(types_pb2.SPLIT_CAUSE_NEW_CONVERSATION)
    before = conversation.before(answers[0])
    # The fingerprint is all that is asked for, so that the request does not grow with the conversation.
    found = await find_calls(
        FindCallsRequest(
            tape_id=tape_id,
            anchors=[await asyncio.to_thread(lambda: before.anchor)],
            include_prompts=with_prompt,
        )
    )
    matches = await asyncio.to_thread(_matches, chat, before, conversation.messages[answers[0]], found.calls)
    if not matches:
        raise Refused(await _why_unmatched(chat, conversation, find_calls, tape_id))
    matches = [match for match in matches if not is_edited(before.messages, _recorded(match[0])[2])]
    if not matches:
        raise Refused(types_pb2.SPLIT_CAUSE_HISTORY_EDITED, "the reasoning of an earlier answer is another")
    if len(matches) > 1:
        matches = await _with_echoed_ids(matches, conversation, find_calls, tape_id) or matches
    call, choice, answer = _choose(matches, conversation)
    _check_context(conversation, call)
    if not _is_complete(call, choice):
        raise Refused(types_pb2.SPLIT_CAUSE_PARENT_INCOMPLETE)
    return Parent(call, choice, answer, call.choices[choice].completion, found.keep_reasoning)


_Match = tuple[_FoundCall, int, Answer]
"""A call, a choice of it, and what that says."""


def _matches(chat: ChatModel, before: Conversation, echo: TemplateMessage, calls: Sequence[_FoundCall]) -> list[_Match]:
    """Return the completions among `calls` that say what `echo` says, in order."""
    return [
        (call, index, answer)
        for call in calls
        for index, choice in enumerate(call.choices)
        if (answer := next((read for read in _readings(chat, before, choice) if read.equals(echo)), None)) is not None
    ]


def _readings(chat: ChatModel, before: Conversation, choice: FindCallsResponse.FoundChoice) -> Iterator[Answer]:
    """Yield what a completion says, in each way that its request may have asked for: that is not on the tape."""
    completion = choice.completion if choice.HasField("completion") else None
    for skip_special_tokens in (True, False):
        for with_tools in (True, False) if before.tools else (False,):
            answer = chat.parse(
                choice.token_ids,
                completion,
                before,
                with_tools=with_tools,
                skip_special_tokens=skip_special_tokens,
            )
            yield answer
            if len(answer.tool_calls) > 1:
                yield answer.with_first_call_only()


def _choose(matches: Sequence[_Match], conversation: Conversation) -> _Match:
    """Return the latest match, but better one of the same adapter and tools, and better a complete one."""
    context = conversation.context

    def fitness(match: _Match) -> tuple[bool, bool, bool]:
        call, choice, _ = match
        has_context = ".".join(_recorded(call)[:2]) == context
        return call.lora_name == conversation.lora_name, has_context, _is_complete(call, choice)

    return max(reversed(matches), key=fitness)


async def _with_echoed_ids(
    matches: Sequence[_Match], conversation: Conversation, find_calls: FindCalls, tape_id: str
) -> list[_Match]:
    """Return the matches of calls whose prompt and completion the client echoes."""
    found = {call.call_id for call in await _echoed_calls(conversation, find_calls, tape_id)}
    echoed = list(conversation.echoed_token_ids)
    return [match for match in matches if match[0].call_id in found and _ends_with(echoed, match)]


async def _echoed_calls(conversation: Conversation, find_calls: FindCalls, tape_id: str) -> Sequence[_FoundCall]:
    """Return the calls whose prompt and one of whose completions are the echoed ids. Prompts do not travel back."""
    echoed = conversation.echoed_token_ids
    if not echoed or not all(0 <= token_id <= _UINT32_MAX for token_id in echoed):
        return ()
    return (await find_calls(FindCallsRequest(tape_id=tape_id, exact_token_ids=echoed))).calls


def _ends_with(token_ids: list[int], match: _Match) -> bool:
    call, choice, _ = match
    completion = list(call.choices[choice].token_ids)
    return token_ids[len(token_ids) - len(completion) :] == completion


def _is_complete(call: _FoundCall, choice: int) -> bool:
    """Whether a choice ended by itself, and not by failing or an abort."""
    found = call.choices[choice]
    return found.HasField("completion") and found.completion.finish_reason in _COMPLETE


async def _why_unmatched(
    chat: ChatModel, conversation: Conversation, find_calls: FindCalls, tape_id: str
) -> SplitCause:
    """Say whether an answer was put in after the last one that a call gave, or stands where a call's answer was.

    Where a call did give the last answer, by the ids that the client echoes, what was before it has been changed.
    """
    last = conversation.answers[0]
    before = {index: conversation.before(index) for index in conversation.answers}
    anchors = await asyncio.to_thread(lambda: {index: part.anchor for index, part in before.items()})
    try:
        echoed = await _echoed_calls(conversation, find_calls, tape_id)
        if await asyncio.to_thread(_matches, chat, before[last], conversation.messages[last], echoed):
            return types_pb2.SPLIT_CAUSE_HISTORY_EDITED
        found = await find_calls(FindCallsRequest(tape_id=tape_id, anchors=list(anchors.values())))
    except grpc.aio.AioRpcError as error:
        # It is only an explanation.
        _logger.warning("why a conversation is not continued cannot be said: %s", error.details())
        return types_pb2.SPLIT_CAUSE_HISTORY_EDITED
    return await asyncio.to_thread(_explain, chat, conversation, anchors, found.calls)


def _explain(
    chat: ChatModel, conversation: Conversation, anchors: Mapping[int, str], calls: Sequence[_FoundCall]
) -> SplitCause:
    """Return the cause; `anchors` are those of the conversation before each answer, the last first."""
    next_was_asked = False
    for index, asked in anchors.items():
        given = [call for call in calls if call.anchor == asked]
        if _matches(chat, conversation.before(index), conversation.messages[index], given):
            return types_pb2.SPLIT_CAUSE_HISTORY_EDITED if next_was_asked else types_pb2.SPLIT_CAUSE_ANSWER_INSERTED
        next_was_asked = bool(given)
    return types_pb2.SPLIT_CAUSE_HISTORY_EDITED


def _check_context(conversation: Conversation, call: _FoundCall) -> None:
    if call.lora_name != conversation.lora_name:
        raise Refused(types_pb2.SPLIT_CAUSE_LORA_CHANGED)
    tools, _, arguments = conversation.context.partition(".")
    recorded_tools, recorded_arguments, _ = _recorded(call)
    if tools != recorded_tools:
        raise Refused(types_pb2.SPLIT_CAUSE_TOOLS_CHANGED)
    if arguments != recorded_arguments:
        raise Refused(types_pb2.SPLIT_CAUSE_TEMPLATE_ARGUMENTS_CHANGED)


def _recorded(call: _FoundCall) -> tuple[str, str, Reasoning]:
    """Return the fingerprints of a call's tools, template arguments and reasoning."""
    tools, _, rest = call.context_fingerprint.partition(".")
    arguments, _, reasoning = rest.partition(".")
    return tools, arguments, from_text(reasoning)
