"""Which call a conversation continues, on a real tape in this process."""

from __future__ import annotations

import json
from typing import Any

import grpc.aio
import pytest

from support.agent import TOOLS, user
from support.talk import Json, Talk
from support.tokenizers import LoadChatModel
from tokentape.v1.tape_pb2 import FindCallsRequest, FindCallsResponse
from tokentape_bridge.anchors import anchor, context_fingerprint
from tokentape_bridge.chat_model import ChatModel
from tokentape_sidecar.engine import FinishReason

IM_END = 2
QUESTION = user("What is in a?")
GO_ON = user("Go on.")


@pytest.fixture
def chat(chat_model: LoadChatModel) -> ChatModel:
    return chat_model("smollm2")


async def test_nothing_that_travels_grows_with_the_conversation(chat: ChatModel) -> None:
    talk = Talk(chat)
    said = await talk.ask([QUESTION], [843, 15439, IM_END], with_whole=False)
    prompts = [len(said.prompt.token_ids)]
    for _ in range(29):
        said = await talk.ask([*said.messages, said.echo, GO_ON], [843, 15439, IM_END], with_whole=False)
        assert said.cause == ""
        prompts.append(len(said.prompt.token_ids))
    assert len(talk.requests) == 29
    assert len({request.ByteSize() for request in talk.requests}) == 1
    assert len({response.ByteSize() for response in talk.responses}) == 1
    assert len(set(prompts[1:])) == 1
    assert len(said.engine_prompt) == sum(prompts) + 29 * 3


async def test_a_complete_answer_is_preferred_to_a_later_one_that_was_aborted(chat: ChatModel) -> None:
    talk = Talk(chat)
    first = await talk.ask([QUESTION], [34, IM_END])
    await talk.ask([QUESTION], [34], reason=FinishReason.ABORT)
    said = await talk.ask([QUESTION, first.echo, GO_ON], [IM_END])
    assert said.prompt.parent is not None
    assert said.prompt.parent.call_id == first.call_id


async def test_an_answer_with_the_same_tools_is_preferred_to_a_later_one(chat: ChatModel) -> None:
    talk = Talk(chat)
    first = await talk.ask([QUESTION], [34, IM_END], tools=TOOLS)
    await talk.ask([QUESTION], [34, IM_END])
    said = await talk.ask([QUESTION, first.echo, GO_ON], [IM_END], tools=TOOLS)
    assert said.prompt.parent is not None
    assert said.prompt.parent.call_id == first.call_id


@pytest.mark.parametrize("ids", [[], [0, 0], [-1], [2**70]])
async def test_an_answer_that_only_aborted_calls_gave_is_incomplete(chat: ChatModel, ids: list[int]) -> None:
    talk = Talk(chat)
    first = await talk.ask([QUESTION], [34], reason=FinishReason.ABORT)
    history = [QUESTION, first.echo, GO_ON]
    assert (await talk.ask(history, [IM_END], echoed_token_ids=ids)).cause == "parent_incomplete"


@pytest.mark.parametrize("edited", [False, True])
async def test_the_echoed_ids_decide_and_no_prompt_travels(chat: ChatModel, edited: bool) -> None:
    talk = Talk(chat)
    first = await talk.ask([QUESTION], [843, 15439, IM_END])
    await talk.ask([QUESTION], [3113, IM_END])
    asked = user("Edited.") if edited else QUESTION
    history = [asked, first.echo, GO_ON]
    said = await talk.ask(history, [IM_END], echoed_token_ids=first.whole, with_whole=False)
    assert said.cause == ("history_edited" if edited else "")
    assert edited or (said.prompt.parent is not None and said.prompt.parent.call_id == first.call_id)
    assert not any(call.prompt_token_ids for response in talk.responses for call in response.calls)


async def test_an_explanation_that_fails_is_an_edit(chat: ChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(chat)
    first = await talk.ask([QUESTION], [34, IM_END])
    find_calls = talk.find_calls

    async def fail_later(request: FindCallsRequest) -> FindCallsResponse:
        if talk.requests:
            raise grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata())
        return await find_calls(request)

    monkeypatch.setattr(talk, "find_calls", fail_later)
    assert (await talk.ask([user("Edited."), first.echo, GO_ON], [IM_END])).cause == "history_edited"


async def test_answers_read_in_any_way_that_a_request_may_ask_for(chat: ChatModel) -> None:
    talk = Talk(chat)
    call = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    text = f"{call}\n{call}"
    sampled = [*chat.tokenizer.encode(text, add_special_tokens=False), IM_END]
    first = await talk.ask([QUESTION], sampled, tools=TOOLS)
    assert len(first.answer.tool_calls) == 2
    as_text = {"role": "assistant", "content": text}  # tool_choice none
    one_call = {**first.echo, "tool_calls": first.echo["tool_calls"][:1]}  # parallel_tool_calls false
    for echo in (first.echo, as_text, one_call):
        assert (await talk.ask([QUESTION, echo, GO_ON], [IM_END], tools=TOOLS)).cause == ""


async def test_special_tokens_shown_in_the_text_are_recognised(chat: ChatModel) -> None:
    talk = Talk(chat)
    await talk.ask([QUESTION], [34, 0, 34, IM_END])
    shown = {"role": "assistant", "content": chat.decode([34, 0, 34], skip_special_tokens=False)}
    # With them in its text no template can write the answer, so that it begins a sample; it is no edit.
    assert (await talk.ask([QUESTION, shown, GO_ON], [IM_END])).cause == "special_token_text"
    hidden = {"role": "assistant", "content": chat.decode([34, 0, 34], skip_special_tokens=True)}
    assert (await talk.ask([QUESTION, hidden, GO_ON], [IM_END])).cause == ""


async def test_deeply_nested_arguments_are_no_error(chat: ChatModel) -> None:
    for depth in (100, 900, 5000):
        arguments = '{"p": ' + "[" * depth + "]" * depth + "}"
        text = f'<tool_call>\n{{"name": "ls", "arguments": {arguments}}}\n</tool_call>'
        talk = Talk(chat)
        said = await talk.ask([QUESTION], [*chat.tokenizer.encode(text, add_special_tokens=False), IM_END], tools=TOOLS)
        call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": arguments}}
        for echo in (said.echo, {"role": "assistant", "content": None, "tool_calls": [call]}):
            await talk.ask([QUESTION, echo, GO_ON], [IM_END], tools=TOOLS)


async def test_the_last_message_may_be_the_answer_itself(chat: ChatModel) -> None:
    talk = Talk(chat)
    first = await talk.ask([QUESTION], [34, IM_END])
    said = await talk.ask([QUESTION, first.echo], [IM_END])
    assert said.cause == ""
    assert said.engine_prompt == chat.render(said.conversation)


async def test_both_calls_without_generation_prompt(chat: ChatModel) -> None:
    talk = Talk(chat)
    opened = chat.tokenizer.encode("<|im_start|>assistant\n2<|im_end|>", add_special_tokens=False)
    first = await talk.ask([QUESTION], opened, add_generation_prompt=False)
    history: list[Json] = [QUESTION, first.echo, GO_ON]
    said = await talk.ask(history, [IM_END], add_generation_prompt=False)
    assert said.cause == ""
    assert said.engine_prompt[: len(first.whole)] == first.whole
    assert chat.decode(said.engine_prompt, skip_special_tokens=False).endswith("Go on.<|im_end|>\n")
    assert (await talk.ask(history, [IM_END])).cause == "template_arguments_changed"


def answer(**fields: Any) -> Json:
    return {"role": "assistant", "content": "a", **fields}


def called(**arguments: Any) -> Json:
    return {"function": {"name": "ls", "arguments": arguments}}


CALL: Json = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": {"p": 1, "q": 2}}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (answer(), answer(content=" a\n"), True),
        (answer(), answer(reasoning_content="r"), True),
        (answer(tool_calls=[CALL]), answer(tool_calls=[{**CALL, "id": "c2"}]), True),
        (
            answer(tool_calls=[CALL]),
            answer(tool_calls=[{"function": {"arguments": {"q": 2, "p": 1}, "name": "ls"}}]),
            True,
        ),
        (answer(tool_calls=[called(p=1)]), answer(tool_calls=[called(p=1.0)]), True),
        (answer(tool_calls=[called(p=1)]), answer(tool_calls=[called(p=True)]), False),
        (answer(), answer(content="b"), False),
        (answer(), answer(tool_calls=[CALL]), False),
        (user("a"), user("a "), False),
        (user("a"), answer(), False),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, {"role": "tool", "content": "x"}, True),
        ({"role": "tool", "content": "x", "name": "ls"}, {"role": "tool", "content": "x", "name": "rm"}, False),
    ],
)
def test_what_makes_another_conversation(one: Json, other: Json, same: bool) -> None:
    assert (anchor([one]) == anchor([other])) is same
    assert len(anchor([one])) == 32


def test_the_context_has_two_parts() -> None:
    tools, arguments = context_fingerprint(TOOLS, {"a": 1}).split(".")
    assert context_fingerprint(json.loads(json.dumps(TOOLS)), {}) == f"{tools}.{context_fingerprint(None, {})[33:]}"
    assert context_fingerprint([], {"a": 1}) == f"{context_fingerprint(None, {})[:32]}.{arguments}"
