"""Streamed answers are the unstreamed ones: at every token boundary, with real tokenizers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from support.agent import TOOLS
from support.sampled import BRACES, CALL, PEPPER, PROMPT, SHELL, STARTED, TWO_CALLS, K, Sampled, sampled, stream_of
from support.streamed import assembled, comparable
from support.text_cuts import cut, every_cut, places
from support.tokenizers import LoadChatModel
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape_bridge.chat_chunks import ChatChunks
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.choice_stream import ChoiceDelta, read_deltas
from tokentape_bridge.completion import CallEvent, StreamError, collect, read_started
from tokentape_bridge.continuation import Prompt
from tokentape_bridge.parents import Conversation
from tokentape_bridge.responses import chat_completion, extension
from tokentape_bridge.schemas import ChatCompletionRequest
from tokentape_bridge.sse import data_frame
from tokentape_bridge.text_stream import TextOptions

TEXTS = {
    "two calls": TWO_CALLS,
    "calls alone": f"{CALL}\n{SHELL}",
    "ill-formed": f"<tool_call>\n{{'name': 1}}\n</tool_call>\n{CALL[:-3]}",
    "thinking cut off": "<think>\nab\n",
    "empty thinking": "<think>\n\n</think>\n\nb",
    "separators": "a\u2028b\u0085c\r\nd \ufffd",
    "nothing": "",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request and the model that answers it."""

    chat: ChatModel
    request: ChatCompletionRequest
    conversation: Conversation

    @classmethod
    def of(cls, chat: ChatModel, **fields: Any) -> Case:
        wishes = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        request = ChatCompletionRequest.model_validate({"messages": [], **wishes, **fields})
        messages = [{"role": "user", "content": "x"}]
        return cls(chat, request, Conversation(messages, request.tools, request.chat_template_kwargs or {}))

    async def whole(self, events: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The unstreamed answer, as its JSON says it."""
        call = await collect(stream_of([STARTED, *events]), self.request.n or 1)
        body = chat_completion(
            self.request,
            call,
            model="m",
            tape_id="",
            prompt=Prompt(PROMPT),
            conversation=self.conversation,
            chat=self.chat,
        )
        return json.loads(json.dumps(body))

    async def chunks(self, events: Sequence[GenerateResponse]) -> list[dict[str, Any]]:
        """The streamed one."""
        stream = stream_of([STARTED, *events])
        started = await read_started(stream)
        request, tokenizer = self.request, self.chat.tokenizer
        chunks = ChatChunks(
            request, call_id="c", model="m", prompt_token_count=started.prompt_token_count, tokenizer=tokenizer
        )
        made = chunks.opening(extension("", "c", Prompt(PROMPT), self.conversation, tokenizer), PROMPT)
        made += [chunk async for added in self.deltas(stream) if (chunk := chunks.chunk(added)) is not None]
        closing = chunks.closing()
        frames = [data_frame(chunk) for chunk in (made if closing is None else [*made, closing])]
        assert all(frame.isascii() and len(frame.splitlines()) == 2 for frame in frames)
        return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]

    def deltas(self, stream: AsyncGenerator[CallEvent]) -> AsyncGenerator[ChoiceDelta]:
        options = TextOptions(
            skip_special_tokens=self.request.skip_special_tokens is not False,
            stop=self.request.stop or (),
            stop_token_ids=frozenset(self.request.stop_token_ids or ()),
            min_tokens=self.request.min_tokens or 0,
        )
        with_tools = self.request.tool_choice != "none"
        streams = self.chat.answer_streams(
            self.conversation, self.request.n or 1, with_tools=with_tools, options=options
        )
        return read_deltas(stream, streams)

    async def check(self, events: Sequence[GenerateResponse]) -> dict[str, Any]:
        """Streamed and unstreamed are the same answer; return it."""
        whole = comparable(await self.whole(events))
        assert comparable(assembled(await self.chunks(events))) == {
            **whole,
            "object": "chat.completion",
        }
        return whole


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
@pytest.mark.parametrize("stops", [True, False], ids=["stop", "length"])
async def test_reasoning_and_two_calls_at_every_token_boundary_B09_B10(
    chat_model: LoadChatModel, kind: str, stops: bool
) -> None:
    chat = chat_model(kind)
    said = sampled(chat, TWO_CALLS, stops=stops, kind=kind)
    choice: dict[str, Any] = {}
    for pieces in every_cut(said.token_ids):
        case = Case.of(chat, top_logprobs=K)
        [choice] = (await case.check(said.events(pieces)))["choices"]
        assert choice["token_ids"] == said.token_ids
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [
            -i / 8 for i in range(len(said.token_ids))
        ]
    assert choice["message"]["reasoning_content"] == f"Hm {PEPPER},\n\n\u65e5\u672c x\u0301."
    assert choice["message"]["content"] == f"I look {PEPPER}:"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["ls", "sh"]
    assert choice["message"]["tool_calls"][1]["function"]["arguments"] == BRACES
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": None},
        {"tool_choice": "none", "skip_special_tokens": False},
        {"parallel_tool_calls": False, "return_tokens_as_token_ids": True},
        {"chat_template_kwargs": {"enable_thinking": False}, "logprobs": None, "return_token_ids": None},
    ],
    ids=["plain", "no tools", "none", "one call", "no thinking"],
)
async def test_any_answer_in_any_pieces_B07_B09_B11(
    chat_model: LoadChatModel, kind: str, name: str, fields: dict[str, Any]
) -> None:
    case = Case.of(chat_model(kind), **fields)
    for stops in (True, False):
        said = sampled(case.chat, TEXTS[name], stops=stops, kind=kind)
        for size in (1, 2, 3, 7, 1000):
            await case.check(said.events(cut(said.token_ids, range(0, len(said.token_ids), size))))


async def test_reasoning_off_leaves_the_tags_in_the_content_B11(chat_model: LoadChatModel) -> None:
    case = Case.of(chat_model("qwen3", reads_reasoning=False), tools=None)
    said = sampled(case.chat, "<think>a</think>b", kind="qwen3")
    for pieces in every_cut(said.token_ids):
        [choice] = (await case.check(said.events(pieces)))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "<think>a</think>b"}


@pytest.mark.parametrize("text", ["a</think>\n\nb", "\nhm\n", "", f"<think>a</think>{CALL}"])
async def test_reasoning_that_the_prompt_has_opened_B11(
    chat_model: LoadChatModel, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.of(chat_model("qwen3"))
    render = case.chat.render_text

    def render_opening(*given: Any, **more: Any) -> str:
        return render(*given, **more) + "<think>\n"

    # As the templates of models that always reason do.
    monkeypatch.setattr(case.chat, "render_text", render_opening)
    said = sampled(case.chat, text, stops=False)
    for pieces in every_cut(said.token_ids):
        [choice] = (await case.check(said.events(pieces)))["choices"]
        assert choice["message"]["reasoning_content"] == text.removeprefix("<think>").partition("</think>")[0].strip(
            "\n"
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=places())
async def test_stop_strings_and_emoji_cut_anywhere_A08(chat_model: LoadChatModel, where: list[int]) -> None:
    case = Case.of(chat_model("smollm2"), stop=["\n<tool", f"{PEPPER}\u65e5", "zzz"], min_tokens=4)
    for text, stop in ((f"a {PEPPER}{PEPPER}\u65e5", f"{PEPPER}\u65e5"), (f"I look {PEPPER}:\n<tool", "\n<tool")):
        said = sampled(case.chat, text, stop_string=stop)
        [choice] = (await case.check(said.events(cut(said.token_ids, where))))["choices"]
        assert choice["message"]["content"] == text.removesuffix(stop)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("cut_after", [1, 2])
async def test_a_character_over_several_tokens_keeps_its_bytes_A08(chat_model: LoadChatModel, cut_after: int) -> None:
    case = Case.of(chat_model("smollm2"))
    ids = case.chat.tokenizer.encode(PEPPER, add_special_tokens=False)
    assert len(ids) > cut_after
    for count in (len(ids), cut_after):
        said = Sampled(ids[:count], {"finish_reason": types_pb2.FINISH_REASON_LENGTH})
        events = said.events(cut(said.token_ids, range(count)))
        [choice] = (await case.check(events))["choices"]
        spelled = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert PEPPER.encode().startswith(spelled)
        # One chunk for each token, and the text in the one that completes it.
        chunks = (await case.chunks(events))[1:-2]
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token_id] for token_id in said.token_ids]
        assert not any("\ufffd" in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert choice["message"]["content"] == (PEPPER if count == len(ids) else "\ufffd")


@pytest.mark.parametrize("sizes", [[1], [2, 2], [1, 1, 2], [4], []])
async def test_the_last_delta_is_neither_lost_nor_doubled_A12(chat_model: LoadChatModel, sizes: list[int]) -> None:
    case = Case.of(chat_model("smollm2"))
    ids = case.chat.tokenizer.encode(" one two three four", add_special_tokens=False)[: sum(sizes)]
    said = Sampled(ids, {"finish_reason": types_pb2.FINISH_REASON_LENGTH})
    pieces = cut(ids, [sum(sizes[:i]) for i in range(len(sizes))]) if ids else []
    body = await case.check(said.events(pieces))
    assert body["choices"][0]["token_ids"] == ids or not ids
    chunks = await case.chunks(said.events(pieces))
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], len(ids))


async def test_choices_interleave_A13(chat_model: LoadChatModel) -> None:
    case = Case.of(chat_model("qwen3"), n=2)
    first = sampled(case.chat, TWO_CALLS, kind="qwen3")
    second = sampled(case.chat, f"<think>\nno\n</think>\n\n{PEPPER}", stops=False)
    a, b = (said.events([[i] for i in said.token_ids], index) for index, said in enumerate((first, second)))
    events = [event for pair in zip(a, b, strict=False) for event in pair] + a[len(b) :]
    body = await case.check(events)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "length"]
    assert body["usage"]["completion_tokens"] == len(first.token_ids) + len(second.token_ids)
    chunks = await case.chunks(events)
    ids = [
        call["id"] for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())
    ]
    assert ids == ["c-0-0", "c-0-1"]


async def test_usage_comes_only_when_asked_for_C08(chat_model: LoadChatModel) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        case = Case.of(chat_model("smollm2"), stream_options=options)
        chunks = await case.chunks(sampled(case.chat, "a").events([[34], [2]]))
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


async def test_a_family_reads_the_whole_and_ids_flow_all_the_same(chat_model: LoadChatModel) -> None:
    case = Case.of(chat_model("qwen3", renderer="qwen3"))
    said = sampled(case.chat, TWO_CALLS, kind="qwen3")
    for size in (1, 5, 1000):
        events = said.events(cut(said.token_ids, range(0, len(said.token_ids), size)))
        await case.check(events)
        chunks = await case.chunks(events)
        assert all(not chunk["choices"][0]["delta"] for chunk in chunks[1:-2])
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:-2]] == cut(
            said.token_ids, range(0, len(said.token_ids), size)
        )


@pytest.mark.parametrize(
    "events",
    [
        [],
        [STARTED],
        Sampled([5], {}).events([[5]])[:1],
        Sampled([5], {}).events([]),
        Sampled([5], {}).events([[5]]) * 2,
        Sampled([5], {}).events([[5]], index=1),
        [GenerateResponse(delta=GenerateResponse.Delta(token_ids=[5]))],
    ],
)
async def test_a_broken_stream_is_an_error_and_closed(
    chat_model: LoadChatModel, events: list[GenerateResponse]
) -> None:
    source = stream_of([STARTED, *events])
    await read_started(source)
    with pytest.raises(StreamError):
        [added async for added in Case.of(chat_model("smollm2")).deltas(source)]
    assert await anext(source, None) is None


@pytest.mark.parametrize("events", [[], Sampled([5], {}).events([[5]])[:1], Sampled([], {}).events([])])
async def test_a_call_begins_with_its_start(events: list[GenerateResponse]) -> None:
    with pytest.raises(StreamError):
        await read_started(stream_of(events))
