"""OpenAI's and Anthropic's own clients on a real engine: both get the same answers, to the same prompts."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import psutil
import pytest
import pytest_asyncio
from pydantic import BaseModel

from integration.conftest import Bridge
from support import tool_rollouts
from support.agent import Tape
from support.real_engine import CPU_ENVIRONMENT
from support.scripted import sidecar_process
from support.sidecar_client import OpenedTape, SidecarClient

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MODEL = "smol"
SAID: list[Any] = [{"role": "user", "content": "Name three colours."}]
# A small model may fill any free string until its tokens end.
PLACE = {"type": "object", "properties": {"p": {"enum": ["here", "there"]}}, "required": ["p"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "ls", "parameters": PLACE}}]
MESSAGE_TOOLS: list[Any] = [{"name": "ls", "input_schema": PLACE}]
GREEDY: dict[str, Any] = {"temperature": 0}
MAX: dict[str, Any] = {"model": MODEL, "max_tokens": 48}
ROOM: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
"""For a call with as much white space as it may have."""


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


class Served:
    """A bridge in front of a real engine, and the clients that it is for."""

    def __init__(self, bridge: Bridge, sidecar: SidecarClient) -> None:
        self.url = str(bridge.client.base_url).rstrip("/")
        self.sidecar = sidecar

    def of_tape(self, tape: OpenedTape | None) -> str:
        return f"{self.url}/tapes/{tape.tape_id}" if tape else self.url

    def openai(self, tape: OpenedTape | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.of_tape(tape)}/v1", api_key="none", max_retries=0)

    def anthropic(self, tape: OpenedTape | None = None) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.of_tape(tape), api_key="none", max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    os.environ |= CPU_ENVIRONMENT
    options = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"]
    with_tools = tool_rollouts.model_with_tools(model_directory, tmp_path_factory.mktemp("model"))
    arguments = ["--model", str(with_tools), "--served-model-name", MODEL, "--name", "a", "--", *options]
    directory = tmp_path_factory.mktemp("served")
    async with sidecar_process(*arguments, directory=directory, seconds=180) as process:
        children = psutil.Process(process.process.pid).children(recursive=True)
        command = ["tokentape-bridge", "--listen", "127.0.0.1:0", "--sidecar", f"a={process.address}"]
        async with SidecarClient(process.address, "a") as client:
            with Bridge(command, directory) as bridge:
                yield Served(bridge.wait_healthy(), client)
                assert "Traceback" not in bridge.log
    for child in children:
        if child.is_running():
            child.kill()


async def test_every_client_gets_the_same_text(served: Served) -> None:
    texts: list[str | None] = []
    usages: list[tuple[int, int]] = []
    with served.openai() as chats, served.anthropic() as messages:
        create: Any = chats.chat.completions.create
        answer = create(messages=SAID, **GREEDY, **MAX)
        texts.append(answer.choices[0].message.content)
        usages.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
        with chats.chat.completions.stream(messages=SAID, **GREEDY, **MAX) as chunks:
            texts.append(chunks.get_final_completion().choices[0].message.content)
        create = messages.messages.create
        message: anthropic.types.Message = create(messages=SAID, extra_body=GREEDY, **MAX)
        texts += [block.text for block in message.content if block.type == "text"]
        usages.append((message.usage.input_tokens, message.usage.output_tokens))
        with messages.messages.stream(messages=SAID, extra_body=GREEDY, **MAX) as events:
            texts.append("".join(events.text_stream))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as chats:
        create = chats.chat.completions.create
        texts.append((await create(messages=SAID, **GREEDY, **MAX)).choices[0].message.content)
    async with (
        anthropic.AsyncAnthropic(base_url=served.url, api_key="none") as messages,
        messages.messages.stream(messages=SAID, extra_body=GREEDY, **MAX) as events,
    ):
        texts.append(await events.get_final_text())
    assert texts[0]
    assert texts == [texts[0]] * 6
    assert usages == [usages[0]] * 2


async def test_a_tools_loop_has_the_same_prompts_and_goes_on(served: Served) -> None:
    tapes = [await served.sidecar.open_tape() for _ in range(2)]
    with served.openai(tapes[0]) as client:
        asked: list[Any] = [*SAID]
        create: Any = client.chat.completions.create
        answer = create(
            messages=asked, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **GREEDY, **ROOM
        )
        [call] = answer.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "a.txt"}
        asked += [answer.choices[0].message.to_dict(), result]
        last = create(messages=asked, tools=TOOLS, **GREEDY, **ROOM).choices[0].message
    with served.anthropic(tapes[1]) as client:
        said: list[Any] = [*SAID]
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        with client.messages.stream(
            messages=said, tools=MESSAGE_TOOLS, tool_choice=choice, extra_body=GREEDY, **ROOM
        ) as stream:
            message = stream.get_final_message()
        [use] = [block for block in message.content if block.type == "tool_use"]
        assert (use.name, use.input) == (call.function.name, json.loads(call.function.arguments))
        assert message.stop_reason == "tool_use"
        given: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "a.txt"}
        said += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [given]}]
        with client.messages.stream(messages=said, tools=MESSAGE_TOOLS, extra_body=GREEDY, **ROOM) as stream:
            assert stream.get_final_text() == last.content
            told: Any = stream.get_final_message().to_dict()["tokentape"]
    assert told["prefix"] == "kept"
    chat, other = [Tape(await served.sidecar.entries(tape)) for tape in tapes]
    assert chat.causes == other.causes == ["new_conversation", ""]
    assert list(chat.prompts.values()) == list(other.prompts.values())
    other.check_conserved()


async def test_structured_output_by_either_client(served: Served) -> None:
    question: list[Any] = [{"role": "user", "content": "Is the sky blue? Answer yes or no."}]
    with served.openai() as client:
        answer = client.chat.completions.parse(messages=question, response_format=Verdict, **GREEDY, **MAX)
        parsed = answer.choices[0].message.parsed
    with served.anthropic() as client:
        message = client.messages.parse(messages=question, output_format=Verdict, extra_body=GREEDY, **MAX)
    assert parsed is not None
    assert parsed.answer in ("yes", "no")
    assert message.parsed_output == parsed
