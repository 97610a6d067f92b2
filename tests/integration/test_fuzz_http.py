"""Anything at all as an HTTP request of the bridge: an answer below 500, and the next request is served.

Requests of the right shape are `test_bridge_schemathesis`'s; these are bytes, JSON that is nearly right, headers, and
what is not HTTP. `TOKENTAPE_EFFORT=100 pytest --timeout 0 tests/integration/test_fuzz_http.py` tries for hours.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.effort import fuzzing
from support.fuzzed_messages import edited, edits

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

SCRIPT = {
    "model": {"name": "toy", "max_model_len": 2048, "vocab_size": 49152, "eos_token_ids": [2]},
    "calls": [{"steps": [{"token_ids": [34, 216]}, {"token_ids": [2], "finish_reason": "stop"}]}],
    "repeat": True,
}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [TOOL], "temperature": 0.5, "stream": True},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3, "stream": False},
    "/v1/messages": {"model": "toy", "max_tokens": 3, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "toy", "messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [34, 216]},
}
BOUNDED = fuzzing(15)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, start_sidecar: StartSidecar) -> Bridge:
    return start_bridge(a=start_sidecar(SCRIPT).address).wait_healthy()


def check(bridge: Bridge) -> None:
    """It serves, and nothing has surprised it."""
    assert bridge.chat().status_code == 200
    assert "Traceback" not in bridge.log


def post(bridge: Bridge, path: str, content: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    """Send a body that says it is JSON."""
    answer = bridge.client.post(path, content=content, headers={"content-type": "application/json"} | (headers or {}))
    assert answer.status_code < 500, (path, content, answer.text)
    return answer


@pytest.mark.parametrize("path", BODIES)
def test_bodies_of_any_bytes(path: str, bridge: Bridge) -> None:
    @given(content=st.binary(max_size=200))
    @BOUNDED
    def answered(content: bytes) -> None:
        post(bridge, path, content)

    answered()
    check(bridge)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_nearly_right(path: str, bridge: Bridge) -> None:
    content = json.dumps(BODIES[path]).encode()
    assert post(bridge, path, content).status_code == 200

    @given(changes=edits())
    @BOUNDED
    def answered(changes: list[tuple[int, int, bytes]]) -> None:
        post(bridge, path, edited(content, changes))

    answered()
    check(bridge)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_with_one_field_of_anything(path: str, bridge: Bridge) -> None:
    @given(name=st.sampled_from(sorted(BODIES[path])), value=JSON)
    @BOUNDED
    def answered(name: str, value: Any) -> None:
        # As Python writes it: NaN, infinities and lone surrogates as well.
        post(bridge, path, json.dumps(BODIES[path] | {name: value}).encode())

    answered()
    check(bridge)


def test_headers_of_anything(bridge: Bridge) -> None:
    names = st.sampled_from(
        ["authorization", "x-tape-id", "content-type", "content-encoding", "accept", "x-request-id", "traceparent",
         "x-request-timeout", "expect", "x-api-key", "anthropic-version", "cookie", "range"]
    )  # fmt: skip
    values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60).map(str.strip)

    @given(headers=st.dictionaries(names, values, max_size=5))
    @BOUNDED
    def answered(headers: dict[str, str]) -> None:
        answer = post(bridge, "/v1/chat/completions", json.dumps({"messages": MESSAGES}).encode(), headers)
        assert answer.headers["content-type"]

    answered()
    check(bridge)


def test_paths_of_anything(bridge: Bridge) -> None:
    part = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#?"), min_size=1, max_size=20)

    @given(
        method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]), parts=st.lists(part, max_size=4)
    )
    @BOUNDED
    def answered(method: str, parts: list[str]) -> None:
        target = ("/" + "/".join(parts)).encode()
        url = bridge.client.base_url.copy_with(raw_path=target)
        assert bridge.client.request(method, url).status_code < 500

    answered()
    check(bridge)


def test_bytes_that_are_not_http(bridge: Bridge) -> None:
    start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"

    @given(
        content=st.binary(max_size=300),
        begun=st.sampled_from([b"", start, start + b"transfer-encoding: chunked\r\n\r\n"]),
    )
    @BOUNDED
    def survived(content: bytes, begun: bytes) -> None:
        url = bridge.client.base_url
        with socket.create_connection((url.host, url.port), timeout=20) as connection:
            connection.sendall(begun + content)

    survived()
    check(bridge)


def test_nesting_without_end(bridge: Bridge) -> None:
    for opening in (b"[", b'{"a":', b'{"messages":[{"role":"user","content":[' * 3):
        answer = post(bridge, "/v1/chat/completions", b'{"messages":' + opening * 100_000)
        assert answer.status_code in {400, 413, 422}
    check(bridge)
