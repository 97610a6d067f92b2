"""Streamed messages are the unstreamed ones, and say what a chat says: at every token boundary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from support.messages import Json, as_chat_message, assembled, events_of, what_chat_says
from support.sampled import BRACES, CALL, PEPPER, PROMPT, SHELL, STARTED, TWO_CALLS, Sampled, sampled, stream_of
from support.text_cuts import cut, every_cut, places
from support.tokenizers import LoadChatModel
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape_bridge.anthropic_api.answers import MessageAnswer
from tokentape_bridge.anthropic_api.requests import to_chat
from tokentape_bridge.anthropic_api.schemas import MessageRequest
from tokentape_bridge.chat import conversation_of
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.choice_stream import ChoiceDelta, read_deltas
from tokentape_bridge.completion import collect, read_started
from tokentape_bridge.continuation import Prompt
from tokentape_bridge.json_bodies import JsonResponse
from tokentape_bridge.responses import chat_completion
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.sse import data_frame
from tokentape_bridge.text_stream import TextOptions

ODD = '{"name": "ls", "arguments": {"n": 123456789012345678901234567890, "f": 1.0, "f" : 2.50}}'
TEXTS = {
    "two calls": TWO_CALLS,
    "calls alone": f"{CALL}\n{SHELL}",
    "text between calls": f"a\n{CALL}\nb\n{SHELL}\nc",
    "ill-formed": f"<tool_call>\n{{'name': 1}}\n</tool_call>\n{CALL[:-3]}",
    "odd arguments": f"<tool_call>\n{ODD}\n</tool_call>",
    "thinking cut off": "<think>\nab\n",
    "empty thinking": "<think>\n\n</think>\n\nb",
    "separators": "a\u2028b\u0085c\r\nd \ufffd",
    "nothing": "",
}
MESSAGE_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("ls", "sh")]


@dataclass(frozen=True, slots=True)
class Case:
    """A request and the model that answers it."""

    chat: ChatModel
    request: MessageRequest
    as_chat: ChatCompletionRequest

    @classmethod
    def of(cls, chat: ChatModel, **fields: Any) -> Case:
        body = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}], "tools": MESSAGE_TOOLS}
        request = MessageRequest.model_validate(body | fields)
        return cls(chat, request, to_chat(request))

    def answer(self) -> MessageAnswer:
        one = self.as_chat.parallel_tool_calls is False
        return MessageAnswer(
            call_id="c", model="m", prompt_token_count=3, extension={"call_id": "c"}, one_call_at_most=one
        )

    async def deltas(self, events: Sequence[GenerateResponse]) -> list[ChoiceDelta]:
        stream = stream_of([STARTED, *events])
        await read_started(stream)
        conversation = conversation_of(self.as_chat, self.as_chat.messages)
        options = TextOptions(stop=self.as_chat.stop or ())
        with_tools = self.as_chat.tool_choice != "none"
        streams = self.chat.answer_streams(conversation, 1, with_tools=with_tools, options=options)
        return [added async for added in read_deltas(stream, streams)]

    async def chat_message(self, events: Sequence[GenerateResponse]) -> Json:
        """What a chat answers."""
        call = await collect(stream_of([STARTED, *events]), 1)
        conversation = conversation_of(self.as_chat, self.as_chat.messages)
        body = chat_completion(
            self.as_chat,
            call,
            model="m",
            tape_id="",
            prompt=Prompt(PROMPT),
            conversation=conversation,
            chat=self.chat,
        )
        return body["choices"][0]["message"]

    async def check(self, events: Sequence[GenerateResponse]) -> Json:
        """Streamed and unstreamed are the same message, which says what a chat says; return it."""
        deltas = await self.deltas(events)
        whole = json.loads(bytes(JsonResponse(self.answer().whole(deltas)).body))
        answer = self.answer()
        sent = [*answer.opening(), *(event for added in deltas for event in answer.events(added))]
        assert assembled(events_of(b"".join(data_frame(event, event["type"]) for event in sent).decode())) == whole
        assert as_chat_message(whole) == what_chat_says(await self.chat_message(events))
        return whole


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
async def test_reasoning_and_two_calls_at_every_token_boundary(chat_model: LoadChatModel, kind: str) -> None:
    case = Case.of(chat_model(kind))
    said = sampled(case.chat, TWO_CALLS, kind=kind)
    for pieces in every_cut(said.token_ids):
        await case.check(said.events(pieces))
    message = await case.check(said.events([said.token_ids]))
    assert message["content"] == [
        {"type": "thinking", "thinking": f"Hm {PEPPER},\n\n\u65e5\u672c x\u0301.", "signature": "tokentape"},
        {"type": "text", "text": f"I look {PEPPER}:"},
        {"type": "tool_use", "id": "toolu_c-0", "name": "ls", "input": {"p": "a"}},
        {"type": "tool_use", "id": "toolu_c-1", "name": "sh", "input": json.loads(BRACES)},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["input_tokens"] == 3
    assert message["usage"]["output_tokens"] == len(said.token_ids)


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None},
        {"tool_choice": {"type": "none"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"thinking": {"type": "disabled"}},
    ],
    ids=["plain", "no tools", "none", "one call", "no thinking"],
)
async def test_any_answer_in_any_pieces(
    chat_model: LoadChatModel, kind: str, name: str, fields: dict[str, Any]
) -> None:
    case = Case.of(chat_model(kind), **fields)
    for stops in (True, False):
        said = sampled(case.chat, TEXTS[name], stops=stops, kind=kind)
        for size in (1, 2, 3, 7, 1000):
            message = await case.check(said.events(cut(said.token_ids, range(0, len(said.token_ids), size))))
            has_calls = any(block["type"] == "tool_use" for block in message["content"])
            ended = "end_turn" if stops else "max_tokens"
            assert message["stop_reason"] == ("tool_use" if has_calls else ended)
    assert not any("" in (block.get("text"), block.get("thinking")) for block in message["content"])


async def test_blocks_stand_in_the_order_of_the_answer(chat_model: LoadChatModel) -> None:
    case = Case.of(chat_model("smollm2"))
    said = sampled(case.chat, TEXTS["text between calls"])
    message = await case.check(said.events([said.token_ids]))
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "text", "tool_use", "text"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=places())
async def test_stop_sequences_cut_anywhere(chat_model: LoadChatModel, where: list[int]) -> None:
    case = Case.of(chat_model("smollm2"), stop_sequences=["\n<tool", f"{PEPPER}\u65e5", "zzz"])
    for text, stop in ((f"a {PEPPER}{PEPPER}\u65e5", f"{PEPPER}\u65e5"), (f"I look {PEPPER}:\n<tool", "\n<tool")):
        said = sampled(case.chat, text, stop_string=stop)
        message = await case.check(said.events(cut(said.token_ids, where)))
        assert message["content"] == [{"type": "text", "text": text.removesuffix(stop)}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    "reason", [types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT, types_pb2.FINISH_REASON_REPETITION]
)
async def test_what_did_not_end_by_itself_ended_early(chat_model: LoadChatModel, reason: Any) -> None:
    case = Case.of(chat_model("smollm2"))
    said = Sampled([34], {"finish_reason": reason})
    message = await case.check(said.events([[34]]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)


async def test_a_family_reads_the_whole(chat_model: LoadChatModel) -> None:
    case = Case.of(chat_model("qwen3", renderer="qwen3"))
    said = sampled(case.chat, f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}", kind="qwen3")
    message = await case.check(said.events([[i] for i in said.token_ids]))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"a": NaN, "b": [-Infinity], "c": 1}', '{"a":null,"b":[null],"c":1}'), ('{"a": 1e400 }', '{"a": 1e400 }')],
)
async def test_input_that_is_no_json_leaves_the_body_json_B09(
    chat_model: LoadChatModel, arguments: str, told: str
) -> None:
    case = Case.of(chat_model("qwen3"))
    said = sampled(case.chat, f'<tool_call>{{"name": "ls", "arguments": {arguments}}}</tool_call>', kind="qwen3")
    body = bytes(JsonResponse(case.answer().whole(await case.deltas(said.events([said.token_ids])))).body)
    assert f'"input":{told}'.encode() in body
    json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
