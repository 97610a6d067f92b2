"""Every error of the bridge, over HTTP: OpenAI's shape, the field's name, and nothing that NeMo Gym takes for a full
context unless it is one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

SECRET = "a prompt that no error repeats"
CHAT = "/v1/chat/completions"
TAPE_OF_NOBODY = "a." + "0" * 32

SCRIPT = {
    "model": {"name": "toy", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]},
    "calls": [{"steps": [{"token_ids": [34, 2], "finish_reason": "stop"}]}],
    "repeat": True,
}


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, start_sidecar: StartSidecar) -> Bridge:
    return start_bridge(a=start_sidecar(SCRIPT).address).wait_healthy()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in `response`, checked for what holds for all of them."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert SECRET not in response.text
    assert 0 < len(error["message"]) < 400
    return error


def looks_like_overflow(response: httpx.Response) -> bool:
    """NeMo Gym's own test of a 400's body."""
    return "context length" in response.text or "max_tokens" in response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": SECRET}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": SECRET}]}, "messages.0.role"),
        ({"messages": [{"content": SECRET}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": SECRET + "\ud800"}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"min_tokens": 5, "max_completion_tokens": 3}, "min_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": SECRET}}, "chat_template_kwargs"),
        ({"metadata": {"tape_id": 5}}, "metadata.tape_id"),
        ({"metadata": {"tape_id": "a.zz"}}, "metadata.tape_id"),
        ({"metadata": {"tape_id": "b." + "0" * 32}}, "metadata.tape_id"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_a_bad_field_is_named(bridge: Bridge, fields: dict[str, Any], param: str) -> None:
    response = post_json(bridge, {"messages": [{"role": "user", "content": SECRET}], **fields})
    error = error_of(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not looks_like_overflow(response)
    # The next request is served.
    assert bridge.chat().status_code == 200


def post_json(bridge: Bridge, body: object) -> httpx.Response:
    # httpx's own JSON refuses what some clients send: lone surrogates and NaN.
    return bridge.client.post(CHAT, content=json.dumps(body), headers={"content-type": "application/json"})


def test_an_image_part_is_refused_by_its_type_B04_F22(bridge: Bridge) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    error = error_of(bridge.chat(messages=[{"role": "user", "content": parts}]), 400)
    assert "image_url" in error["message"]


@pytest.mark.parametrize("value", [0, -1])
def test_a_bad_max_tokens_is_named(bridge: Bridge, value: int) -> None:
    assert error_of(bridge.chat(max_tokens=value), 400)["param"] == "max_tokens"


@pytest.mark.parametrize(
    "content",
    [
        b"{bad",
        b"",
        b"[]",
        b'"text"',
        b'{"messages": "\xff"}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_a_bad_body_is_refused_C09(bridge: Bridge, content: bytes) -> None:
    response = bridge.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    error_of(response, 400)
    assert not looks_like_overflow(response)


@pytest.mark.parametrize("headers", [{"content-type": "text/plain"}, {}])
def test_the_body_must_say_that_it_is_json_C09(bridge: Bridge, headers: dict[str, str]) -> None:
    content = json.dumps({"messages": [{"role": "user", "content": SECRET}]}).encode()
    error_of(bridge.client.post(CHAT, content=content, headers=headers), 415)


def test_unknown_paths_methods_models_and_tapes_C05_C09(bridge: Bridge) -> None:
    error_of(bridge.client.get("/v1/nothing"), 404)
    allowed = bridge.client.get(CHAT)
    error_of(allowed, 405)
    assert allowed.headers["allow"] == "POST"
    unknown = error_of(bridge.chat(model="other"), 404)
    assert (unknown["param"], unknown["code"]) == ("model", "model_not_found")
    assert "toy" in unknown["message"]
    assert error_of(bridge.client.post("/tokenize", json={"model": "other", "prompt": "x"}), 404)["param"] == "model"
    assert error_of(bridge.chat(metadata={"tape_id": TAPE_OF_NOBODY}), 404)["code"] == "not_found"


def test_metadata_and_header_must_agree(bridge: Bridge) -> None:
    response = bridge.client.post(
        CHAT,
        json={"messages": [{"role": "user", "content": SECRET}], "metadata": {"tape_id": TAPE_OF_NOBODY}},
        headers={"x-tape-id": "a." + "1" * 32},
    )
    assert error_of(response, 400)["param"] == "metadata.tape_id"


@pytest.mark.parametrize("body", [{}, {"messages": [{"role": "user"}], "prompt": "x"}])
def test_tokenize_takes_messages_or_a_prompt(bridge: Bridge, body: dict[str, Any]) -> None:
    assert error_of(bridge.client.post("/tokenize", json=body), 400)["param"] == "messages"


def test_the_openai_client_raises_its_own_errors(bridge: Bridge) -> None:
    with openai.OpenAI(base_url=f"{bridge.client.base_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "word " * 400}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}], temperature=-1)
        assert caught.value.param == "temperature"
