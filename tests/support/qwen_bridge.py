"""A bridge before an engine with Qwen3's tokenizer and template, which answers what it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.answering import AnsweringEngine, AnsweringSidecar, answering_sidecar
from support.tokenizers import KINDS, TokenizerDirectory

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
END = KINDS["qwen3"].stop_token_ids[0]
VOCABULARY = 151936

QUESTION: Json = {"role": "user", "content": "Weather?"}
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}},
    }
    for name in ("weather", "shell")
]


def calling(content: Any = None, **fields: Any) -> Json:
    """An assistant message with a call."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"p": "Oslo"}'}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **fields}


RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "22C sunny"}


@pytest.fixture(scope="module")
def sidecar(tokenizer_directory: TokenizerDirectory) -> Iterator[AnsweringSidecar]:
    engine = AnsweringEngine(tokenizer_directory("qwen3"), "Hi.", end=END, vocabulary_size=VOCABULARY)
    with answering_sidecar(engine, "a") as running:
        yield running


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


@pytest.fixture(autouse=True)
def says_hi(sidecar: AnsweringSidecar) -> None:
    """At first, in every test."""
    sidecar.engine.say("Hi.")


def ask(bridge: Bridge, messages: list[Json] | None = None, **fields: Any) -> Json:
    response = bridge.client.post(CHAT, json={"messages": messages or [QUESTION], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(bridge: Bridge, messages: list[Json], **fields: Any) -> Json:
    response = bridge.client.post(CHAT, json={"messages": messages, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompt_of(bridge: Bridge, sidecar: AnsweringSidecar, messages: list[Json], **fields: Any) -> list[int]:
    """The prompt's ids: by the answer, by the engine, and by /tokenize, which must agree."""
    body = ask(bridge, messages, return_token_ids=True, **fields)
    prompt = list(sidecar.calls[-1].prompt_token_ids)
    assert body["prompt_token_ids"] == prompt
    tokenized = bridge.client.post("/tokenize", json={"messages": messages, **fields}).json()
    assert tokenized["tokens"] == prompt
    assert tokenized["count"] == len(prompt)
    return prompt


def text_of(bridge: Bridge, token_ids: list[int]) -> str:
    return bridge.client.post("/detokenize", json={"tokens": token_ids}).json()["prompt"]
