"""Cases from the field about templates, tools and reasoning, over HTTP, with Qwen3's tokenizer and template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.answering import AnsweringSidecar
from support.qwen_bridge import (
    CHAT,
    QUESTION,
    RESULT,
    TOOLS,
    Json,
    ask,
    bridge,
    calling,
    prompt_of,
    refusal,
    says_hi,
    sidecar,
    text_of,
)

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

__all__ = ["bridge", "says_hi", "sidecar"]


NAMED: Json = {"type": "function", "function": {"name": "weather"}}

ODD = "mkdir -p test/{a,b </tool_call> c"


def written(name: str = "weather", **arguments: str) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def unparsed(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    """A bridge that leaves reasoning in the content."""
    return start_bridge("--reasoning-parser", "none", a=sidecar.address).wait_healthy()


def both_ways(bridge: Bridge, **fields: Any) -> list[tuple[Json, str]]:
    """The message and finish reason of one request, whole and streamed."""
    [whole] = ask(bridge, **fields)["choices"]
    response = bridge.client.post(CHAT, json={"messages": [QUESTION], "stream": True, **fields})
    *frames, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    message: Json = {}
    reasons: list[str] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                assert [call["index"] for call in value] == list(
                    range(len(message.get(name, [])), len(message.get(name, [])) + len(value))
                )
                message[name] = message.get(name, []) + value
            else:
                message[name] = message.get(name, "") + value
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    [reason] = reasons
    return [(essence(whole["message"]), whole["finish_reason"]), (essence(message), reason)]


def essence(message: Json) -> Json:
    """A message without what a stream writes otherwise: ids and places of calls, null beside calls."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=str)
def test_content_null_absent_or_empty_beside_calls_B03(
    bridge: Bridge, sidecar: AnsweringSidecar, content: Json
) -> None:
    answer = {key: value for key, value in calling().items() if key != "content"} | content
    prompt = prompt_of(bridge, sidecar, [QUESTION, answer, RESULT], tools=TOOLS)
    assert prompt == prompt_of(bridge, sidecar, [QUESTION, calling(""), RESULT], tools=TOOLS)
    text = text_of(bridge, prompt)
    assert "None" not in text
    assert "null" not in text


def test_answers_always_have_content_B03(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(written(p="Oslo"))
    message = ask(bridge, tools=TOOLS)["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 1)


PARTS = [{"type": "text", "text": "22C"}, {"type": "text", "text": " sunny"}]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_parts_are_the_same_prompt_as_their_text_B04(bridge: Bridge, sidecar: AnsweringSidecar, place: int) -> None:
    history = [QUESTION, calling(""), RESULT]
    prompts = [
        prompt_of(bridge, sidecar, [{**m, "content": content} if i == place else m for i, m in enumerate(history)])
        for content in ("22C sunny", PARTS)
    ]
    assert prompts[0] == prompts[1]


def test_no_parts_are_the_empty_string_B04(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    contents: list[Any] = [[], ""]
    asked = [prompt_of(bridge, sidecar, [{"role": "user", "content": content}]) for content in contents]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_part_that_is_no_text_is_refused_and_named_B04(bridge: Bridge, role: str, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,x"}}
    error = refusal(bridge, [QUESTION, {"role": role, "content": [part]}])
    assert error["param"] == "messages.1.content.0"
    assert kind in error["message"]


def test_the_developer_is_never_dropped_B05(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    developer = {"role": "developer", "content": "Reply only BANANA"}
    alone = text_of(bridge, prompt_of(bridge, sidecar, [developer, QUESTION]))
    assert "BANANA" in alone
    both = text_of(bridge, prompt_of(bridge, sidecar, [{"role": "system", "content": "Be KIND"}, developer, QUESTION]))
    assert 0 < both.index("KIND") < both.index("BANANA") < both.index("Weather?")


@pytest.mark.parametrize("role", [{"role": "critic"}, {"role": ""}, {"role": None}, {"role": 5}, {}], ids=str)
def test_no_role_and_an_unknown_one_are_refused_B05(bridge: Bridge, role: Json) -> None:
    assert refusal(bridge, [{**role, "content": "x"}])["param"] == "messages.0.role"


def test_extra_fields_are_ignored_and_known_ones_arrive_B06(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    usual = prompt_of(bridge, sidecar, [QUESTION])
    before = sidecar.calls[-1].sampling
    extra: Json = {"id": "m1", "refusal": None, "annotations": []}
    nulls = dict.fromkeys(("parallel_tool_calls", "tool_choice", "stop", "tools", "response_format", "stream_options"))
    fields: Json = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", **nulls}
    fields |= {"top_k": 5, "min_p": 0.5, "required_prefix_token_ids": [1, 2], "vendor_field": {"deep": [1]}}
    ask(bridge, [{**QUESTION, **extra}], **fields)
    call = sidecar.calls[-1]
    assert list(call.prompt_token_ids) == usual
    assert (call.sampling.top_k, call.sampling.min_p) == (5, 0.5)
    assert (call.sampling.stop, call.sampling.temperature) == (before.stop, before.temperature)
    assert bridge.log.count("'vendor_field'") == bridge.log.count("'messages[].annotations'") == 1


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_the_finish_reason_agrees_with_the_calls_B07(bridge: Bridge, sidecar: AnsweringSidecar, choice: Any) -> None:
    # This engine heeds no grammar: that a call is asked for does not make one.
    whole, streamed = both_ways(bridge, tools=TOOLS, tool_choice=choice)
    assert whole == streamed == ({"role": "assistant", "content": "Hi.", "tool_calls": []}, "stop")
    sidecar.engine.say(written(p="Oslo"))
    whole, streamed = both_ways(bridge, tools=TOOLS, tool_choice=choice)
    assert whole == streamed
    assert whole[1] == "tool_calls"
    assert len(whole[0]["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}], ids=str)
def test_a_call_that_was_not_to_be_is_text_B07(bridge: Bridge, sidecar: AnsweringSidecar, fields: Json) -> None:
    sidecar.engine.say(written(p="Oslo"))
    whole, streamed = both_ways(bridge, **fields)
    assert whole == streamed
    assert (whole[0]["tool_calls"], whole[1]) == ([], "stop")
    assert whole[0]["content"] == written(p="Oslo")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        {"type": "custom", "custom": {"name": "weather"}},
        {"type": "function"},
        "any",
        5,
    ],
    ids=str,
)
def test_other_tool_choices_are_refused_B07(bridge: Bridge, choice: Any) -> None:
    assert refusal(bridge, [QUESTION], tools=TOOLS, tool_choice=choice)["param"] == "tool_choice"


def test_other_tools_than_functions_are_refused(bridge: Bridge) -> None:
    error = refusal(bridge, [QUESTION], tools=[*TOOLS, {"type": "custom", "custom": {"name": "x"}}])
    assert error["param"] == "tools.2.type"


def test_odd_arguments_are_read_whole_B09(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(f"<think>\nhm\n</think>\n\nDo {written('shell', p=ODD)}")
    whole, streamed = both_ways(bridge, tools=TOOLS)
    assert whole == streamed
    message, reason = whole
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("hm", "Do")
    assert json.loads(message["tool_calls"][0]["arguments"]) == {"p": ODD}
    assert reason == "tool_calls"


def test_parallel_calls_have_their_own_ids_over_turns_B10(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(written(p="Oslo") + "\n" + written("shell", p="ls"))
    messages, ids = [QUESTION], list[str]()
    for _ in range(2):
        message = ask(bridge, messages, tools=TOOLS)["choices"][0]["message"]
        calls = message["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather", "shell"]
        ids += [call["id"] for call in calls]
        messages += [message, *({**RESULT, "tool_call_id": call["id"]} for call in calls)]
    assert len(set(ids)) == 4


def test_one_call_at_a_time_loses_no_ids_B10(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(written(p="Oslo") + "\n" + written("shell", p="ls"))
    [choice] = ask(bridge, tools=TOOLS, parallel_tool_calls=False, return_token_ids=True)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["token_ids"] == sidecar.engine.answer
    whole, streamed = both_ways(bridge, tools=TOOLS, parallel_tool_calls=False)
    assert whole == streamed


@pytest.mark.parametrize(
    ("text", "fields", "reasoning", "content"),
    [
        ("<think>abc", {"max_tokens": 2}, "abc", ""),
        ("abc", {"chat_template_kwargs": {"enable_thinking": False}}, None, "abc"),
        ("<think>a</think>b", {}, "a", "b"),
        ("<think>\n\n</think>\n\nb", {}, "", "b"),
        ("b", {}, None, "b"),
    ],
)
def test_reasoning_that_is_cut_empty_or_off_B11(
    *,
    bridge: Bridge,
    unparsed: Bridge,
    sidecar: AnsweringSidecar,
    text: str,
    fields: Json,
    reasoning: str,
    content: str,
) -> None:
    sidecar.engine.say(text)
    whole, streamed = both_ways(bridge, **fields)
    assert whole == streamed
    message, reason = whole
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == content
    assert reason == ("length" if "max_tokens" in fields else "stop")
    # Without a parser nothing is read.
    whole, streamed = both_ways(unparsed, **fields)
    assert whole == streamed
    assert (whole[0]["content"], "reasoning_content" in whole[0]) == (text, False)
