"""Reading completions: reasoning, tool calls and what is neither, as text and on the bridge's answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.agent import TOOLS
from support.tokenizers import KINDS, LoadChatModel
from tokentape.v1 import types_pb2
from tokentape_bridge.answer_parser import parse_answer
from tokentape_bridge.answers import Answer
from tokentape_bridge.completion import Call, Choice
from tokentape_bridge.continuation import Prompt
from tokentape_bridge.parents import Conversation
from tokentape_bridge.responses import chat_completion
from tokentape_bridge.schemas import ChatCompletionRequest

NOTHING: dict[str, Any] = {}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'


def read(text: str, *, with_tools: bool = True, is_open: bool = False, with_reasoning: bool = True) -> Answer:
    return parse_answer(text, with_tools=with_tools, reasoning_is_open=is_open, with_reasoning=with_reasoning)


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("ls", {"p": "a"})]),
        (f"I look.\n{CALL}", "I look.", [("ls", {"p": "a"})]),
        (f"{CALL}\n{CALL}", "", [("ls", {"p": "a"})] * 2),
        (f"{CALL} and {CALL} then", " and  then", [("ls", {"p": "a"})] * 2),
        ('<tool_call>{"name":"ls"}</tool_call>', "", [("ls", NOTHING)]),
        ('<tool_call>{"arguments": {}, "name": "ls"}</tool_call>', "", [("ls", NOTHING)]),
        (
            '<tool_call>\n{"name": "ls" , "arguments":{"p" : "a"\r\n,"q":1}}\n</tool_call>',
            "",
            [("ls", {"p": "a", "q": 1})],
        ),
        (
            '<tool_call>{"name": "sh", "arguments": {"c": "mkdir -p test/{a,b"}}</tool_call>',
            "",
            [("sh", {"c": "mkdir -p test/{a,b"})],
        ),
        (
            '<tool_call>{"name": "say", "arguments": {"t": "</tool_call> \\"}} <tool_call>"}}</tool_call>',
            "",
            [("say", {"t": '</tool_call> "}} <tool_call>'})],
        ),
        (
            '<tool_call>{"name": "say", "arguments": {"arguments": {"name": "x"}}}</tool_call>',
            "",
            [("say", {"arguments": {"name": "x"}})],
        ),
    ],
)
def test_calls_are_read_as_the_model_wrote_them(text: str, content: str, calls: list[Any]) -> None:
    answer = read(text)
    assert (answer.content, calls_of(answer)) == (content, calls)
    # What the client gets is the model's own JSON, a part of the text.
    assert all(call.arguments_text in text or call.arguments == {} for call in answer.tool_calls)
    assert all(json.loads(call.arguments_text) == call.arguments for call in answer.tool_calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n',
        '<tool_call>\n{"name": "ls", "arguments": {"p": "a"\n</tool_call>',
        '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}} extra\n</tool_call>',
        '<tool_call>{"name": "ls", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>{'name': 'ls'}</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "</tool_call> {}",
    ],
)
def test_what_is_no_well_formed_call_stays_content_F04(text: str) -> None:
    assert read(text) == Answer(text)
    # And hides no call that follows it.
    answer = read(f"{text}\n{CALL}")
    assert calls_of(answer) == [("ls", {"p": "a"})]
    assert text.strip() in answer.content


def test_of_equal_keys_the_last_counts() -> None:
    [call] = read('<tool_call>{"name": "ls", "arguments": {"p": 1}, "arguments": {"p": 2}}</tool_call>').tool_calls
    assert (call.arguments, call.arguments_text) == ({"p": 2}, '{"p": 2}')


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>abc", False, "abc", ""),
        ("abc", False, None, "abc"),
        ("abc", True, "abc", ""),
        ("<think>a</think>b", False, "a", "b"),
        ("\n<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a</think>\n\nb", True, "a", "b"),
        ("b <think>a</think>", False, None, "b <think>a</think>"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_reasoning_B11(text: str, is_open: bool, reasoning: str | None, content: str) -> None:
    answer = read(text, is_open=is_open)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert read(text, is_open=is_open, with_reasoning=False) == Answer(text)


def test_a_call_within_reasoning_is_none_and_one_after_it_is() -> None:
    answer = read(f"<think>\nShall I {CALL}?\n</think>\n\n{CALL}")
    assert answer.reasoning == f"Shall I {CALL}?"
    assert (answer.content, calls_of(answer)) == ("", [("ls", {"p": "a"})])


def echo(answer: Answer, **changes: Any) -> dict[str, Any]:
    return {**answer.as_template_message(), **changes}


def test_an_echo_equals_its_answer_but_for_what_clients_do() -> None:
    answer = read(f"<think>hm</think>I look. \n{CALL}")
    same = echo(answer)
    assert answer.equals(same)
    assert answer.equals({key: value for key, value in same.items() if key != "reasoning_content"})
    assert answer.equals(echo(answer, content=" I look."))
    assert not answer.equals(echo(answer, reasoning_content="ha"))
    assert not answer.equals(echo(answer, content="I  look."))
    assert not answer.equals(echo(answer, tool_calls=[]))
    assert not answer.equals(echo(answer, tool_calls=same["tool_calls"] * 2))


@pytest.mark.parametrize(
    ("written", "echoed", "equal"),
    [
        ('{"a": 1.0, "b": 2}', {"b": 2.0, "a": 1}, True),
        ('{"a": 1}', {"a": True}, False),
        ('{"a": 0}', {"a": False}, False),
        ('{"a": NaN, "b": 1e400}', {"a": float("nan"), "b": float("inf")}, True),
        ('{"a": "\\u00e9"}', {"a": "é"}, True),
        ('{"a": null}', {}, False),
        ('{"a": [1, 2]}', {"a": [2, 1]}, False),
        ('{"a": "1"}', {"a": 1}, False),
    ],
)
def test_arguments_are_compared_as_values(written: str, echoed: Any, equal: bool) -> None:
    answer = read(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    [call] = answer.as_template_message()["tool_calls"]
    changed = {"function": {**call["function"], "arguments": echoed}}
    assert answer.equals(echo(answer, tool_calls=[changed])) is equal


def completed(chat_model: LoadChatModel, text: str, kind: str = "smollm2", reads: bool = True, **fields: Any) -> Any:
    """The choice of the bridge's answer to a request with tools for which `text` was sampled."""
    chat = chat_model(kind, reads_reasoning=reads)
    cut = fields.pop("cut", False)
    reason = types_pb2.FINISH_REASON_LENGTH if cut else types_pb2.FINISH_REASON_STOP
    ids = [*chat.tokenizer.encode(text, add_special_tokens=False), *(() if cut else [KINDS[kind].stop_token_ids[0]])]
    finished = types_pb2.Completion(finish_reason=reason, token_count=len(ids))
    request = ChatCompletionRequest.model_validate({"messages": [], "tools": TOOLS, "return_token_ids": True, **fields})
    body = chat_completion(
        request,
        Call("c", 3, [Choice(ids, [-0.5] * len(ids), [[] for _ in ids], finished)]),
        model="m",
        tape_id="",
        prompt=Prompt([1]),
        conversation=Conversation(
            [{"role": "user", "content": "x"}], request.tools, request.chat_template_kwargs or {}
        ),
        chat=chat,
    )
    [choice] = body["choices"]
    assert choice["token_ids"] == ids, "whatever the text says, no id is lost"
    return choice


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "ls"}}, None])
def test_finish_reason_is_tool_calls_where_there_are_calls_B07(
    chat_model: LoadChatModel, kind: str, choice: Any
) -> None:
    called = completed(chat_model, CALL, kind, tool_choice=choice)
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["content"] is None
    [call] = called["message"]["tool_calls"]
    assert call["function"] == {"name": "ls", "arguments": '{"p": "a"}'}
    prose = completed(chat_model, "No tool is needed.", kind, tool_choice=choice)
    assert prose["finish_reason"] == "stop"
    assert "tool_calls" not in prose["message"]
    assert prose["message"]["content"] == "No tool is needed."
    assert completed(chat_model, CALL + "\nand", kind, tool_choice=choice, cut=True)["finish_reason"] == "tool_calls"
    assert completed(chat_model, CALL[:-3], kind, tool_choice=choice, cut=True)["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_without_tools_a_call_is_text(chat_model: LoadChatModel, fields: dict[str, Any]) -> None:
    choice = completed(chat_model, CALL, **fields)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
def test_braces_and_tags_in_arguments_arrive_whole_B09(chat_model: LoadChatModel, kind: str) -> None:
    value = {"c": "mkdir -p test/{a,b", "t": "</tool_call>"}
    text = f'<think>\nnow\n</think>\n\n<tool_call>\n{{"name": "sh", "arguments": {json.dumps(value)}}}\n</tool_call>'
    message = completed(chat_model, text, kind)["message"]
    assert message["reasoning_content"] == "now"
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == value


def test_parallel_calls_have_ids_of_their_own_B10(chat_model: LoadChatModel) -> None:
    two = completed(chat_model, f"{CALL}\n{CALL}")["message"]["tool_calls"]
    assert len({call["id"] for call in two}) == 2
    one = completed(chat_model, f"{CALL}\n{CALL}", parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1
    assert one["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "kwargs", "reasoning", "content"),
    [
        ("<think>abc", {}, "abc", ""),
        ("abc", {"enable_thinking": False}, None, "abc"),
        ("<think>a</think>b", {}, "a", "b"),
    ],
)
def test_reasoning_on_the_answer_B11(
    chat_model: LoadChatModel, text: str, kwargs: Any, reasoning: str | None, content: str
) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": kwargs, "cut": True}
    message = completed(chat_model, text, "qwen3", **fields)["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    message = completed(chat_model, text, "qwen3", reads=False, **fields)["message"]
    assert ("reasoning_content" in message, message["content"]) == (False, text)


def test_a_name_that_utf_8_cannot_write_makes_no_call() -> None:
    text = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert (read(text).content, read(text).tool_calls) == (text, ())
