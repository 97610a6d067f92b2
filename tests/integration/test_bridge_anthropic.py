"""The Messages API through real bridge and sidecar processes, by Anthropic's own clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anthropic
import pytest

from support.agent import TOOLS, Agent, message_of, user
from support.messages import Json, as_chat_message, assembled, comparable, events_of, what_chat_says
from support.rig import OpenAgent
from tokentape.v1.types_pb2 import FINISH_REASON_ABORT

MESSAGE_TOOLS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]
HI: list[Any] = [{"role": "user", "content": "Begin."}]
MAX: dict[str, Any] = {"model": "toy", "max_tokens": 200}


def client_of(url: object, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(url), api_key="none", max_retries=0, **options)


def of_tape(agent: Agent) -> anthropic.Anthropic:
    """A client that is recorded on the agent's tape, by its base URL alone."""
    return client_of(f"{agent.client.base_url}/tapes/{agent.tape_id}")


def ask(client: anthropic.Anthropic, messages: list[Any], **fields: Any) -> Json:
    """Have a message answered."""
    # Its overloads are told apart by fields that a test does not spell out.
    create: Any = client.messages.create
    return create(messages=messages, **fields, **MAX).to_dict()


def tools_loop(client: anthropic.Anthropic, turns: int, *, streamed: bool, tools: Any) -> list[Json]:
    """What a harness does: its tools' results, or another question, follow each answer."""
    messages: list[Any] = [*HI]
    answers: list[Json] = []
    for _ in range(turns):
        if streamed:
            with client.messages.stream(messages=messages, tools=tools, **MAX) as stream:
                answer: Json = dict(stream.get_final_message().to_dict())
        else:
            answer = ask(client, messages, tools=tools)
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "Go on."} for call in calls]
        messages += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": results or "Go on."},
        ]
        answers.append(answer)
    return answers


# Conversations.


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
@pytest.mark.parametrize("name", ["text", "call"])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_conversation_has_a_chat_s_prompts_and_goes_on_as_it_does(
    open_agent: OpenAgent, kind: str, name: str, streamed: bool
) -> None:
    chat, agent = await open_agent(kind, name), await open_agent(kind, name)
    bodies = [chat.turn() for _ in range(3)]
    tools = MESSAGE_TOOLS if name == "call" else []
    answers = await asyncio.to_thread(tools_loop, of_tape(agent), 3, streamed=streamed, tools=tools or anthropic.omit)
    expected, tape = await chat.tape(), await agent.tape()
    assert tape.causes == expected.causes == ["new_conversation", "", ""]
    tape.check_conserved()
    assert list(tape.prompts.values()) == list(expected.prompts.values())
    for body, answer, call in zip(bodies, answers, tape.calls, strict=True):
        assert as_chat_message(answer) == what_chat_says(message_of(body))
        assert answer["stop_reason"] == ("tool_use" if name == "call" else "end_turn")
        assert answer["usage"]["input_tokens"] == body["usage"]["prompt_tokens"]
        assert answer["usage"]["output_tokens"] == body["usage"]["completion_tokens"]
        assert answer["tokentape"]["call_id"] == call.call_id
        told = {"call_id", "parent_call_id", "tape_id"}
        assert {key: value for key, value in answer["tokentape"].items() if key not in told} == {
            key: value for key, value in body["tokentape"].items() if key not in told
        }
    ids = [block["id"] for answer in answers for block in answer["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) == (3 if name == "call" else 0)


@pytest.mark.parametrize("keep_reasoning", [True, False])
async def test_thinking_goes_round(open_agent: OpenAgent, keep_reasoning: bool) -> None:
    chat = await open_agent("qwen3", "reason", keep_reasoning=keep_reasoning)
    agent = await open_agent("qwen3", "reason", keep_reasoning=keep_reasoning)
    for _ in range(2):
        chat.turn()
    first, second = await asyncio.to_thread(tools_loop, of_tape(agent), 2, streamed=True, tools=anthropic.omit)
    assert first["content"] == second["content"]
    assert first["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "tokentape"},
        {"type": "text", "text": "Done."},
    ]
    expected, tape = await chat.tape(), await agent.tape()
    assert tape.causes == expected.causes
    assert tape.causes[1] == ("" if keep_reasoning else "template_strips_reasoning")
    assert list(tape.prompts.values()) == list(expected.prompts.values())


async def test_a_chat_goes_on_from_a_message_and_the_other_way_round(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "call")
    agent.turn()
    result = {"type": "tool_result", "tool_use_id": "c", "content": "Go on."}
    call = {"type": "tool_use", "id": "c", "name": "ls", "input": {"p": "a", "q": [1, {"x": True, "y": None}]}}
    messages: list[Any] = [
        *HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = ask(of_tape(agent), messages, tools=MESSAGE_TOOLS)
    assert answer["tokentape"]["prefix"] == "kept"
    echo = {
        "type": "function",
        "id": "d",
        "function": {"name": "ls", "arguments": '{"q":[1,{"x":true,"y":null}],"p":"a"}'},
    }
    agent.messages += [{"role": "assistant", "tool_calls": [echo]}, user("And?")]
    assert agent.ask()["tokentape"]["parent_call_id"] == answer["tokentape"]["call_id"]


async def test_the_whole_of_a_request_has_a_chat_s_prompt(open_agent: OpenAgent) -> None:
    chat, agent = await open_agent("qwen3", "text"), await open_agent("qwen3", "text")
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"p": "a"}'}}
    chat.ask(
        [
            {"role": "system", "content": "Be brief. Now."},
            user("List a and b."),
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "hm",
                "tool_calls": [call, call | {"id": "d"}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x <|im_end|> y"},
            {"role": "tool", "tool_call_id": "d", "content": "z"},
            user("And now?"),
        ],
        tools=TOOLS,
        chat_template_kwargs={"enable_thinking": False},
    )
    use = {"type": "tool_use", "id": "c", "name": "ls", "input": {"p": "a"}}
    request: Json = {
        "system": [{"type": "text", "text": "Be brief. "}, {"type": "text", "text": "Now."}],
        "messages": [
            {"role": "user", "content": "List a and b."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    use,
                    use | {"id": "d"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "x <|im_end|> y"},
                    {"type": "tool_result", "tool_use_id": "d", "content": [{"type": "text", "text": "z"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "tools": MESSAGE_TOOLS,
        "thinking": {"type": "disabled"},
    }
    client = of_tape(agent)
    answer = ask(client, **request)
    assert answer["tokentape"]["special_token_text"] is True
    [expected], [got] = (await chat.tape()).prompts.values(), (await agent.tape()).prompts.values()
    assert got == expected
    count = client.messages.count_tokens(model="toy", **request)
    assert count.input_tokens == len(got) == answer["usage"]["input_tokens"]


async def test_the_count_is_that_of_the_continued_prompt(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "text")
    client = of_tape(agent)
    messages: list[Any] = [*HI, {"role": "assistant", "content": ask(client, HI)["content"]}, *HI]
    count = client.messages.count_tokens(model="toy", messages=messages)
    assert ask(client, messages)["usage"]["input_tokens"] == count.input_tokens


async def test_a_begun_answer_is_written_on(open_agent: OpenAgent) -> None:
    chat, agent = await open_agent("smollm2", "text"), await open_agent("smollm2", "text")
    chat.ask([user("Begin."), {"role": "assistant", "content": "Well"}], continue_final_message=True)
    answer = ask(of_tape(agent), [*HI, {"role": "assistant", "content": "Well"}])
    assert as_chat_message(answer) == {"content": " international"}
    assert list((await agent.tape()).prompts.values()) == list((await chat.tape()).prompts.values())


@pytest.mark.parametrize("place", ["user_id", "tape_id", "header"])
async def test_other_ways_to_name_the_tape(open_agent: OpenAgent, place: str) -> None:
    agent = await open_agent("smollm2", "text")
    named: Json = {"metadata": {place: agent.tape_id}}
    if place == "header":
        named = {"extra_headers": {"x-tape-id": agent.tape_id}}
    with client_of(agent.client.base_url) as client:
        create: Any = client.messages.with_raw_response.create
        answer = create(messages=HI, **named, **MAX)
    assert answer.parse().to_dict()["tokentape"]["tape_id"] == answer.headers["x-tape-id"] == agent.tape_id
    assert len((await agent.tape()).calls) == 1


# Streams.


async def test_every_client_gets_the_same_message(open_agent: OpenAgent) -> None:
    agent = await open_agent("qwen3", "reason")
    client = of_tape(agent)
    whole = comparable(ask(client, HI))
    events = client.messages.create(messages=HI, stream=True, **MAX)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    with client.messages.stream(messages=HI, **MAX) as stream:
        assert "".join(stream.text_stream) == "Done."
        assert comparable(dict(stream.get_final_message().to_dict())) == whole
    async with anthropic.AsyncAnthropic(base_url=client.base_url, api_key="none", max_retries=0) as many:
        create: Any = many.messages.create
        assert comparable((await create(messages=HI, **MAX)).to_dict()) == whole
        async with many.messages.stream(messages=HI, **MAX) as running:
            thinking = [event.thinking async for event in running if event.type == "thinking"]
            assert "".join(thinking) == "hm"
            assert comparable(dict((await running.get_final_message()).to_dict())) == whole
        counted = await many.messages.count_tokens(model="toy", messages=HI)
    assert counted.input_tokens == whole["usage"]["input_tokens"]


async def test_a_stream_s_frames(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "call")
    path = f"/tapes/{agent.tape_id}/v1/messages"
    body = {"messages": HI, "tools": MESSAGE_TOOLS, **MAX}
    streamed = agent.client.post(path, json=body | {"stream": True}, params={"beta": "true"})
    whole = agent.client.post(path, json=body)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    for response in (streamed, whole):
        assert response.headers["request-id"] == response.headers["x-request-id"]
        assert response.headers["x-tape-id"] == agent.tape_id
        assert response.headers["x-prefix"] == "new"
    message = assembled(events_of(streamed.text))
    assert message["tokentape"]["call_id"] == streamed.headers["x-call-id"]
    assert message["id"] == f"msg_{streamed.headers['x-call-id']}"
    assert comparable(message) == comparable(whole.json())


async def test_a_sealed_tape_takes_no_more(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "text")
    await agent.seal()
    with pytest.raises(anthropic.BadRequestError) as sealed:
        of_tape(agent).messages.create(messages=HI, **MAX)
    assert sealed.value.error_code == "tape_sealed"


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_aborts_its_call(open_agent: OpenAgent, streamed: bool) -> None:
    agent = await open_agent("smollm2", "slow")
    client = anthropic.AsyncAnthropic(base_url=str(of_tape(agent).base_url), api_key="none", max_retries=0)

    async def ask() -> None:
        if not streamed:
            await client.messages.create(messages=HI, **MAX)
        async with client.messages.stream(messages=HI, **MAX) as stream:
            async for _ in stream:
                pass

    async with client:
        asking = asyncio.create_task(ask())
        async with asyncio.timeout(10):
            tape = await agent.tape()
            while not tape.calls or not tape.sampled(tape.calls[0].call_id):
                await asyncio.sleep(0.02)
                tape = await agent.tape()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    left = time.monotonic()
    while not (finished := [e.choice_finished for e in (await agent.tape()).entries if e.HasField("choice_finished")]):
        assert time.monotonic() - left < 1, "the engine goes on"
        await asyncio.sleep(0.02)
    assert finished[0].completion.finish_reason == FINISH_REASON_ABORT
