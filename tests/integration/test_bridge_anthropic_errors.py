"""Errors of the Messages API, by Anthropic's own clients: its shape, the field's name, and what may be tried again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import pytest

from support.messages import Json, events_of

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

HI: list[Any] = [{"role": "user", "content": "Begin."}]
SECRET = "a prompt that no error repeats"


def client_of(bridge: Bridge, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(bridge.client.base_url), api_key=key, max_retries=0)


SCRIPTS: dict[str, list[Json]] = {
    "fails": [{"token_ids": [34]}, {"error": "it broke"}],
    "short": [{"token_ids": [34]}, {"token_ids": [2], "finish_reason": "stop"}],
}


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, start_sidecar: StartSidecar) -> Bridge:
    """In front of a sidecar whose engine fails, and one with little room."""

    def start(name: str) -> str:
        model = {"name": name, "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
        return start_sidecar({"model": model, "calls": [{"steps": SCRIPTS[name]}], "repeat": True}, name=name).address

    bridge = start_bridge("--max-request-bytes", "100000", **{name: start(name) for name in SCRIPTS}).wait_healthy()
    deadline = time.monotonic() + 20
    while len(bridge.client.get("/v1/models").json()["data"]) < len(SCRIPTS):
        assert time.monotonic() < deadline, bridge.log
        time.sleep(0.05)
    return bridge


def error_of(response: httpx.Response, status: int, kind: str) -> Json:
    """The error in `response`, checked for what holds for all of them."""
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer.keys() == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["request_id"] == response.headers["request-id"]
    assert answer["error"]["type"] == kind
    assert SECRET not in response.text
    assert response.headers["x-should-retry"] == ("true" if status >= 500 else "false")
    return answer["error"]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": SECRET}]}]}, "messages.0.content.0: "),
        ({"messages": []}, "messages: "),
        ({"messages": SECRET}, "messages: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": -1}, "temperature: "),
        ({"stop_sequences": [5]}, "stop_sequences.0: "),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"metadata": {"user_id": "a." + "0" * 32}}, "metadata.tape_id: "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: "),
    ],
)
def test_a_bad_field_is_named(bridge: Bridge, fields: Json, problem: str, streamed: bool) -> None:
    body = {"model": "short", "max_tokens": 5, "messages": HI, "stream": streamed, **fields}
    response = bridge.client.post("/v1/messages", json=body)
    assert error_of(response, 400, "invalid_request_error")["message"].startswith(problem)


def test_errors_by_the_client_s_own_classes(bridge: Bridge) -> None:
    with client_of(bridge) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="claude-x", max_tokens=5, messages=HI)
        assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
        assert missing.value.request_id
        long: list[Any] = [{"role": "user", "content": "word " * 400}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*maximum context length") as full:
            client.messages.create(model="short", max_tokens=5, messages=long)
        assert full.value.error_code == "context_length_exceeded"
        assert client.messages.count_tokens(model="short", messages=long).input_tokens > 256
        with pytest.raises(anthropic.InternalServerError) as broken:
            client.messages.create(model="fails", max_tokens=5, messages=HI)
        assert (broken.value.type, broken.value.error_code) == ("api_error", "engine_error")
        huge: list[Any] = [{"role": "user", "content": "x" * 100_000}]
        with pytest.raises(anthropic.ContentTooLargeError):
            client.messages.create(model="short", max_tokens=5, messages=huge)


def test_every_error_below_the_path_has_the_shape(bridge: Bridge) -> None:
    body = {"model": "short", "max_tokens": 5, "messages": HI}
    post = bridge.client.post
    error_of(bridge.client.get("/v1/messages"), 405, "invalid_request_error")
    error_of(bridge.client.get("/v1/messages/batches"), 404, "not_found_error")
    error_of(
        post("/v1/messages", content=b"{bad", headers={"content-type": "application/json"}),
        400,
        "invalid_request_error",
    )
    error_of(post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
    error_of(post(f"/tapes/short.{'0' * 32}/v1/messages", json=body), 404, "not_found_error")
    error_of(post("/v1/messages/count_tokens", json={"model": "short"}), 400, "invalid_request_error")
    # Others have OpenAI's.
    assert bridge.chat(model="other").json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_key_is_asked_for(start_bridge: StartBridge, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key")
    # There is no sidecar: with the key the answer is another error.
    locked = start_bridge("--api-key-file", str(tmp_path / "keys"), a="127.0.0.1:9")
    with client_of(locked) as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(model="toy", max_tokens=5, messages=HI)
    assert (refused.value.type, refused.value.error_code) == ("authentication_error", "invalid_api_key")
    with (
        client_of(locked, "a-key") as client,
        pytest.raises(anthropic.APIStatusError) as unavailable,
    ):
        client.messages.create(model="toy", max_tokens=5, messages=HI)
    assert (unavailable.value.status_code, unavailable.value.type) == (503, "overloaded_error")
    assert unavailable.value.response.headers["x-should-retry"] == "true"


def test_an_engine_that_fails_ends_the_stream_with_an_error(bridge: Bridge) -> None:
    with client_of(bridge) as client, pytest.raises(anthropic.APIStatusError) as raised:
        list(client.messages.create(model="fails", max_tokens=5, messages=HI, stream=True))
    assert (raised.value.type, raised.value.error_code) == ("api_error", "engine_error")
    body = {"model": "fails", "max_tokens": 5, "messages": HI, "stream": True}
    events = events_of(bridge.client.post("/v1/messages", json=body).text)
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
