"""NeMo Gym's own model server, as released, in front of the bridge: what it makes of our answers, over HTTP.

The cases are those of its own tests that need an inference server, which these replace by a mock.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.answering import AnsweringEngine, AnsweringSidecar, answering_sidecar
from support.tokenizers import KINDS, TokenizerDirectory

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

Json = dict[str, Any]

IM_END = KINDS["qwen3"].stop_token_ids[0]
START_SECONDS = 60
REASONING, CONTENT = "Let me see.", "Checking."
CALLS = [("get_order_status", '{"order_id": "123"}'), ("get_delivery_date", '{"order_id": "234"}')]
PLAIN = "Hello there."
REASONED = f"<think>\n{REASONING}\n</think>\n\n{CONTENT}"
CALLING = REASONED + "".join(
    f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS
)
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": name,
        "strict": True,
        "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
    }
    for name, _ in CALLS
]


@pytest.fixture(scope="module")
def sidecar(tokenizer_directory: TokenizerDirectory) -> Iterator[AnsweringSidecar]:
    engine = AnsweringEngine(tokenizer_directory("qwen3"), PLAIN, end=IM_END, vocabulary_size=151936)
    with answering_sidecar(engine, "a") as running:
        yield running


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


@pytest.fixture(scope="module")
def gym(
    start_bridge: StartBridge,
    bridge: Bridge,
    sidecar: AnsweringSidecar,
    checkout: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """Gym's servers: `training` wants token ids, `plain` does not; neither is to parse reasoning for `raw`."""
    unparsed = start_bridge("--reasoning-parser", "none", a=sidecar.address).wait_healthy()
    common = {"base_url": f"http://{bridge.address}/v1", "api_key": "none", "model": "toy"}
    servers = {
        "training": {**common, "return_token_id_information": True, "uses_reasoning_parser": True},
        "plain": {**common, "return_token_id_information": False, "uses_reasoning_parser": True},
        "raw": {
            **common,
            "base_url": f"http://{unparsed.address}/v1",
            "return_token_id_information": True,
            "uses_reasoning_parser": False,
        },
        "strict": {**common, "return_token_id_information": False, "uses_reasoning_parser": False},
    }
    directory = tmp_path_factory.mktemp("gym")
    (directory / "servers.json").write_text(json.dumps(servers))
    ready, log = directory / "ready", directory / "gym.log"
    command = [str(checkout / ".venv-gym" / "bin" / "python"), str(checkout / "tests/support/gym_model_server.py")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(directory / "servers.json"), str(ready)], stdout=output, stderr=output, cwd=directory
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        with httpx.Client(base_url=ready.read_text(), timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=20)


def respond(gym: httpx.Client, server: str, given: Any, **fields: Any) -> Json:
    """What the server's Responses API answers."""
    response = gym.post(f"/{server}/v1/responses", json={"input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def kinds(response: Json) -> list[str]:
    return [item["type"] for item in response["output"]]


def with_ids(response: Json) -> list[Json]:
    return [item for item in response["output"] if item.get("generation_token_ids") is not None]


def test_an_answer_has_the_ids_that_the_engine_sampled(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    response = respond(gym, "training", "Hi")
    assert response["output"][-1]["content"][0]["text"] == PLAIN
    [item] = with_ids(response)
    assert item["generation_token_ids"] == sidecar.engine.answer
    assert item["prompt_token_ids"] == list(sidecar.calls[-1].prompt_token_ids)
    assert item["generation_log_probs"] == [-0.5] * len(sidecar.engine.answer)
    assert response["usage"]["output_tokens"] == len(sidecar.engine.answer)
    assert response["usage"]["input_tokens"] == len(item["prompt_token_ids"])
    assert response["incomplete_details"] is None


def test_ids_are_left_out_where_gym_does_not_want_them(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    assert with_ids(respond(gym, "plain", "Hi")) == []


def test_reasoning_and_calls_are_items_of_their_own(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(CALLING)
    response = respond(gym, "training", "Check my order", tools=TOOLS, parallel_tool_calls=True)
    assert kinds(response) == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, *calls = response["output"]
    assert reasoning["summary"][0]["text"].strip() == REASONING
    assert message["content"][0]["text"].strip() == CONTENT
    assert [(call["name"], call["arguments"]) for call in calls] == CALLS
    assert len({call["call_id"] for call in calls}) == 2
    [item] = with_ids(response)
    assert item["generation_token_ids"] == sidecar.engine.answer


def test_a_second_turn_continues_the_first_on_its_tape(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    tape = sidecar.run(sidecar.client.open_tape(keep_reasoning=True))
    fields: Json = {"tools": TOOLS, "metadata": {"tape_id": tape.tape_id}}
    history: list[Json] = [{"role": "user", "content": "Check my order"}]
    sidecar.engine.say(CALLING)
    first = respond(gym, "training", history, **fields)
    asked, answer = list(sidecar.calls[-1].prompt_token_ids), sidecar.engine.answer
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    sidecar.engine.say(PLAIN)
    second = respond(gym, "training", [*history, *first["output"], *results], **fields)
    assert kinds(second) == ["message"]
    prompt = list(sidecar.calls[-1].prompt_token_ids)
    assert prompt[: len(asked) + len(answer)] == asked + answer
    assert with_ids(second)[0]["prompt_token_ids"] == prompt


def test_without_a_reasoning_parser_the_tags_stay_in_the_content_B11(
    gym: httpx.Client, sidecar: AnsweringSidecar
) -> None:
    sidecar.engine.say(REASONED)
    response = respond(gym, "raw", "Hi")
    assert kinds(response) == ["message"]
    assert response["output"][0]["content"][0]["text"] == REASONED
    assert with_ids(response)[0]["generation_token_ids"] == sidecar.engine.answer


def test_gym_refuses_reasoning_that_it_was_not_to_get(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(REASONED)
    answer = gym.post("/strict/v1/responses", json={"input": "Hi"})
    assert (answer.status_code, "uses_reasoning_parser" in answer.text) == (500, True)
    # An answer that only happens to have none is taken.
    sidecar.engine.say(PLAIN)
    assert kinds(respond(gym, "strict", "Hi")) == ["message"]


def test_a_full_context_is_an_empty_answer_and_not_a_failure(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    response = respond(gym, "training", "word " * 5000)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert with_ids(response) == []


def test_a_cut_answer_is_incomplete_and_has_its_ids(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    response = respond(gym, "training", "Hi", max_output_tokens=2)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert with_ids(response)[0]["generation_token_ids"] == sidecar.engine.answer[:2]


def test_a_bad_request_fails_the_rollout_at_once(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    calls = len(sidecar.calls)
    answer = gym.post("/plain/v1/responses", json={"input": "Hi", "temperature": -1})
    assert answer.status_code == 500
    assert "temperature" in answer.text
    assert len(sidecar.calls) == calls


def test_metadata_reaches_the_template_and_the_engine(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    respond(gym, "training", "Hi")
    usual = sidecar.calls[-1]
    metadata = {
        "chat_template_kwargs": json.dumps({"enable_thinking": False}),
        "extra_body": json.dumps({"top_k": 5, "min_p": 0.25}),
    }
    respond(gym, "training", "Hi", metadata=metadata)
    call = sidecar.calls[-1]
    assert (call.sampling.top_k, call.sampling.min_p) == (5, 0.25)
    assert len(call.prompt_token_ids) > len(usual.prompt_token_ids), "the template closes the thinking"


def test_the_developer_is_heard(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    history = [{"role": "developer", "content": "Reply BANANA"}, {"role": "user", "content": "Hi"}]
    respond(gym, "training", history)
    as_developer = list(sidecar.calls[-1].prompt_token_ids)
    respond(gym, "training", [{"role": "system", "content": "Reply BANANA"}, history[1]])
    assert list(sidecar.calls[-1].prompt_token_ids) == as_developer


def test_a_null_top_logprobs_loses_no_ids(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": None}
    answer = gym.post("/training/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["generation_token_ids"] == sidecar.engine.answer


def test_gym_never_needs_to_tokenize(gym: httpx.Client, bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(CALLING)
    respond(gym, "training", "Check my order", tools=TOOLS)
    assert "/v1/chat/completions" in bridge.log
    assert "/tokenize" not in bridge.log


def test_what_gym_would_tokenize_is_the_prompt_B13(
    gym: httpx.Client, bridge: Bridge, sidecar: AnsweringSidecar
) -> None:
    sidecar.engine.say(PLAIN)
    # In the order of keys that Gym's own types give them.
    order = ("name", "description", "parameters", "strict")
    tools = [{"function": {key: tool[key] for key in order}, "type": "function"} for tool in TOOLS]
    body = {"messages": [{"content": "Hi", "role": "user"}], "tools": tools}
    arguments = {"enable_thinking": False}
    metadata = {"chat_template_kwargs": json.dumps(arguments)}
    answer = gym.post("/training/v1/chat/completions", json={**body, "metadata": metadata})
    assert answer.status_code == 200, answer.text
    # What Gym's server asks where an answer comes without ids.
    fallback = {"model": "toy", **body, "chat_template_kwargs": arguments}
    tokens = bridge.client.post("/tokenize", json=fallback).json()["tokens"]
    assert tokens == list(sidecar.calls[-1].prompt_token_ids)


def test_gyms_anthropic_messages_work_through_the_bridge(gym: httpx.Client, sidecar: AnsweringSidecar) -> None:
    sidecar.engine.say(PLAIN)
    body = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
    answer = gym.post("/plain/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][-1]["text"] == PLAIN
