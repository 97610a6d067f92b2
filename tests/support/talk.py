"""A conversation with a model whose every token is the test's, through the bridge's continuation and on a real tape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from support.engines import ManualEngine, toy_model
from support.sidecar_client import new_tape_id
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape.v1.tape_pb2 import FindCallsRequest, FindCallsResponse, OpenTapeRequest
from tokentape_bridge.answers import Answer
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.continuation import Prompt, continue_or_render
from tokentape_bridge.messages import to_template_messages
from tokentape_bridge.parents import Conversation
from tokentape_bridge.schemas import Message
from tokentape_sidecar import convert
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import FinishReason
from tokentape_sidecar.interceptors import Context
from tokentape_sidecar.tape_servicer import TapeServicer
from tokentape_sidecar.tape_store import TapeStore

Json = dict[str, Any]

_FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}


@dataclass(frozen=True, slots=True)
class Said:
    """One call: what the engine was given and what it sampled."""

    call_id: str
    messages: list[Json]
    """The history, as the client sent it."""
    conversation: Conversation
    prompt: Prompt
    engine_prompt: list[int]
    completion: list[int]
    answer: Answer

    @property
    def cause(self) -> str:
        """Why it has no parent, as in the bridge's answers; empty where it has one."""
        if self.prompt.parent is not None:
            return ""
        return types_pb2.SplitCause.Name(self.prompt.split_cause).removeprefix("SPLIT_CAUSE_").lower()

    @property
    def whole(self) -> list[int]:
        """Prompt and completion."""
        return [*self.engine_prompt, *self.completion]

    @property
    def echo(self) -> Json:
        """The answer as a client sends it back."""
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}
            for i, call in enumerate(self.answer.tool_calls)
        ]
        echo: Json = {"role": "assistant", "content": self.answer.content}
        if self.answer.reasoning is not None:
            echo["reasoning_content"] = self.answer.reasoning
        return echo | ({"tool_calls": calls} if calls else {})


class Talk:
    """The sidecar's own tape and calls, in this process; the engine samples what the test says."""

    def __init__(self, chat: ChatModel, *, keep_reasoning: bool = False) -> None:
        self.chat = chat
        self.tape_id = new_tape_id()
        self.requests: list[FindCallsRequest] = []
        """What the continuation has asked the tape."""
        self.responses: list[FindCallsResponse] = []
        """What the tape has answered."""
        model = toy_model(max_context_tokens=2**20, vocabulary_size=2**20)
        self._engine = ManualEngine(model)
        self._calls = Calls(self._engine)
        self._tapes = TapeStore("main", model, self._calls)
        self._servicer = TapeServicer(tapes=self._tapes, calls=self._calls)
        request = OpenTapeRequest(tape_id=self.tape_id, keep_reasoning=keep_reasoning)
        self._tapes.open(self.tape_id, convert.limits_from_proto(request.limits), convert.policy_from_proto(request))

    async def ask(
        self,
        messages: Sequence[Json],
        completion: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reason: FinishReason = FinishReason.STOP,
        with_whole: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        echoed_token_ids: Sequence[int] = (),
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> Said:
        """Make a call of the conversation `messages`, for which the engine samples `completion`."""
        conversation = Conversation(
            to_template_messages([Message.model_validate(message) for message in messages]),
            tools,
            template_arguments or {},
            add_generation_prompt=add_generation_prompt,
            echoed_token_ids=echoed_token_ids,
        )
        prompt = await continue_or_render(
            self.chat, conversation, self.find_calls, tape_id=self.tape_id, with_whole=with_whole
        )
        request = GenerateRequest(tape_id=self.tape_id)
        prompt.put_into(request, conversation)
        record = await self._calls.start(convert.call_request_from_proto(request), self._tapes.writable(self.tape_id))
        stop_reason = stop_token_id if stop_string is None else stop_string
        self._engine.finish(record.call_id, *completion, reason=reason, stop_reason=stop_reason)
        finished = types_pb2.Completion(finish_reason=_FINISH_REASONS[reason], token_count=len(completion))
        if stop_string is not None:
            finished.stop_string = stop_string
        elif stop_token_id is not None:
            finished.stop_token_id = stop_token_id
        return Said(
            record.call_id,
            list(messages),
            conversation,
            prompt,
            list(self._engine.submitted[-1].prompt_token_ids),
            list(completion),
            self.chat.parse(completion, finished, conversation, with_tools=True),
        )

    async def find_calls(self, request: FindCallsRequest) -> FindCallsResponse:
        """Ask the tape, as the continuation does."""
        self.requests.append(request)
        found = await self._servicer.FindCalls(request, cast("Context", None))  # which it does not use
        self.responses.append(found)
        return found
