"""The bridge as an HTTP server: keys, the limit on bodies, metrics, request ids and the log, and its end."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support.metrics import samples_of
from support.sidecar_client import SidecarClient
from tokentape.channel import dial
from tokentape.v1.tape_pb2 import OpenTapeRequest
from tokentape.v1.tape_pb2_grpc import TapeServiceStub

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

CHAT = "/v1/chat/completions"
MAX_BYTES = 200_000
KEY, OTHER_KEY = "a-key-that-nobody-logs", "another-key-that-nobody-logs"
SECRET = "a prompt that no log repeats"


def script(*steps: dict[str, Any]) -> dict[str, Any]:
    model = {"name": "toy", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
    return {"model": model, "calls": [{"steps": steps}], "repeat": True}


@pytest.fixture(scope="module")
def sidecar(start_sidecar: StartSidecar) -> ServerProcess:
    return start_sidecar(script({"token_ids": [34]}, {"token_ids": [35, 2], "finish_reason": "stop"}))


@pytest.fixture(scope="module")
def slow_sidecar(start_sidecar: StartSidecar) -> ServerProcess:
    return start_sidecar(script({"token_ids": [34]}, {"token_ids": [35], "delay_ms": 60_000}))


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: ServerProcess) -> Bridge:
    return start_bridge("--max-request-bytes", str(MAX_BYTES), a=sidecar.address).wait_healthy()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Keys.


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n")
    return file


@pytest.fixture
def locked(start_bridge: StartBridge, sidecar: ServerProcess, key_file: Path) -> Iterator[Bridge]:
    bridge = start_bridge("--api-key-file", str(key_file), a=sidecar.address).wait_healthy()
    yield bridge
    assert KEY not in bridge.log
    assert OTHER_KEY not in bridge.log


def ask(bridge: Bridge, headers: Mapping[str, str | bytes]) -> httpx.Response:
    sent = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers.items()]
    return bridge.client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]}, headers=sent)


def test_without_a_key_only_what_probes_need_is_answered(locked: Bridge) -> None:
    shown = [
        {},
        {"authorization": KEY},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEY}x"},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": b"\xfc"},
    ]
    for headers in shown:
        refused = ask(locked, headers)
        assert error_of(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/nothing", "/tapes/a.0/health"):
        error_of(locked.client.get(path), 401)
    for path in ("/health", "/version", "/metrics", "/docs", "/openapi.json"):
        assert locked.client.get(path).status_code == 200
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}):
        assert ask(locked, headers).status_code == 200
    with (
        openai.OpenAI(base_url=f"{locked.client.base_url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_keys_change_with_their_file(locked: Bridge, key_file: Path) -> None:
    def status(key: str) -> int:
        return ask(locked, {"x-api-key": key}).status_code

    assert (status(KEY), status(OTHER_KEY)) == (200, 401)
    _replace(key_file, f"{KEY}\n{OTHER_KEY}\n")
    assert (status(KEY), status(OTHER_KEY)) == (200, 200)
    _replace(key_file, OTHER_KEY)
    assert (status(KEY), status(OTHER_KEY)) == (401, 200)
    # Nobody is let in, and nobody shut out, by a file that is empty or gone.
    _replace(key_file, "\n")
    assert (status(""), status(OTHER_KEY)) == (401, 200)
    key_file.unlink()
    assert (status(""), status(OTHER_KEY)) == (401, 200)
    assert locked.log.count("cannot be used, its secrets stay as they are") == 2


def _replace(file: Path, content: str) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(content)
    draft.replace(file)


@pytest.mark.parametrize("content", [None, "\n \n"])
def test_a_key_file_without_a_key_is_one_line_and_status_1(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    ended = run_bridge("--api-key-file", str(file))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"tokentape-bridge: --api-key-file {file} cannot be used: ")
    assert ended.stderr.count("\n") == 1


def run_bridge(*options: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("tokentape-bridge"))
    command = [program, "--sidecar", "a=127.0.0.1:1", "--listen", "127.0.0.1:0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


# The limit on bodies.


def body_of(size: int) -> bytes:
    """A chat's body of `size` bytes."""
    empty = json.dumps({"messages": [{"role": "user", "content": "hi"}], "user": ""}).encode()
    return empty.replace(b'""', b'"' + b"x" * (size - len(empty)) + b'"')


JSON_TYPE = {"content-type": "application/json"}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_refused_and_one_at_the_limit_is_not(bridge: Bridge, chunked: bool) -> None:
    def post(size: int) -> httpx.Response:
        body = body_of(size)
        pieces = (body[start : start + 10_000] for start in range(0, size, 10_000))
        return bridge.client.post(CHAT, content=pieces if chunked else body, headers=JSON_TYPE)

    assert post(MAX_BYTES).status_code == 200
    for size in (MAX_BYTES + 1, 40 * MAX_BYTES):
        refused = post(size)
        error = error_of(refused, 413)
        assert (error["code"], error["type"]) == ("request_too_large", "invalid_request_error")
        assert str(MAX_BYTES) in error["message"]
        assert refused.headers["connection"] == "close"
        assert post(MAX_BYTES).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_the_rest_of_a_body_above_the_limit_is_not_waited_for(bridge: Bridge, declared: bool) -> None:
    with closing(http.client.HTTPConnection(bridge.address, timeout=5)) as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("content-type", "application/json")
        connection.putheader(*(("content-length", 10**12) if declared else ("transfer-encoding", "chunked")))
        connection.endheaders()
        if not declared:
            connection.send(b"%x\r\n" % (MAX_BYTES + 1) + b"x" * (MAX_BYTES + 1) + b"\r\n")
        assert connection.getresponse().status == 413


# Metrics, ids, log.


async def test_one_scrape_tells_of_requests_tokens_and_prefixes(
    start_bridge: StartBridge, sidecar: ServerProcess
) -> None:
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    history = [{"role": "user", "content": "Begin."}]
    prompt_tokens = 0
    async with SidecarClient(sidecar.address, "a") as client:
        tape = await client.open_tape()
        for _ in range(2):
            answer = bridge.chat(messages=history, metadata={"tape_id": tape.tape_id}).json()
            prompt_tokens += answer["usage"]["prompt_tokens"]
            history += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    assert bridge.chat(temperature="hot").status_code == 400
    assert bridge.client.get("/one").status_code == bridge.client.get("/two").status_code == 404
    told = samples_of(bridge.client.get("/metrics"))
    assert told["http_requests_total", "POST", CHAT, "200"] == 2
    assert told["http_requests_total", "POST", CHAT, "400"] == 1
    assert told["http_requests_total", "GET", "none", "404"] == 2
    assert told["http_request_duration_seconds_count", "POST", CHAT] == 3
    assert 0 < told["http_request_duration_seconds_sum", "POST", CHAT] < 30
    assert told["vllm:prompt_tokens_total", "toy"] == prompt_tokens > 0
    assert told["vllm:generation_tokens_total", "toy"] == 6
    assert told["tokentape:tape_calls_total", "new", "new_conversation"] == 1
    assert told["tokentape:tape_calls_total", "kept", ""] == 1
    # The scrape itself.
    assert told["tokentape:http_requests_in_flight",] == 1


def test_requests_in_flight_are_told(start_bridge: StartBridge, slow_sidecar: ServerProcess) -> None:
    bridge = start_bridge("--grace-seconds", "0", a=slow_sidecar.address).wait_healthy()

    def in_flight() -> float:
        return samples_of(bridge.client.get("/metrics"))["tokentape:http_requests_in_flight",]

    with closing(http.client.HTTPConnection(bridge.address, timeout=5)) as connection:
        connection.request("POST", CHAT, body_of(200), JSON_TYPE)
        wait_until(lambda: in_flight() == 2)
    wait_until(lambda: in_flight() == 1)
    assert samples_of(bridge.client.get("/metrics"))["http_requests_total", "POST", CHAT, "499"] == 1


def test_a_request_id_is_echoed_or_made(bridge: Bridge) -> None:
    def answered(headers: dict[str, str]) -> str:
        return bridge.client.get("/v1/models", headers=headers).headers["x-request-id"]

    assert answered({"x-request-id": "turn-7.a:b_c"}) == "turn-7.a:b_c"
    made = {answered({}), answered({"x-request-id": "with space"}), answered({"x-request-id": "x" * 129})}
    assert len(made) == 3
    assert all(len(one) == 32 for one in made)
    # Refusals of what stands before the routes have one, too.
    assert bridge.client.post(CHAT, content=body_of(MAX_BYTES + 1), headers=JSON_TYPE).headers["x-request-id"]
    assert bridge.client.get("/nothing", headers={"x-request-id": "lost"}).headers["x-request-id"] == "lost"


async def test_a_request_s_line_has_the_route_and_counts_and_no_content(bridge: Bridge, sidecar: ServerProcess) -> None:
    async with SidecarClient(sidecar.address, "a") as client:
        tape_id = (await client.open_tape()).tape_id
        path = f"/tapes/{tape_id}{CHAT}"
        body = {"messages": [{"role": "user", "content": SECRET}]}
        answer = bridge.client.post(path, json=body, headers={"x-request-id": "r-1"}, params={"q": SECRET})
    assert answer.status_code == 200
    [line] = [line for line in bridge.log.splitlines() if "id=r-1" in line]
    tokens = f"sidecar=a prompt={answer.json()['usage']['prompt_tokens']} completion=3"
    assert " INFO " in line
    assert f"POST /tapes/{{tape_id}}{CHAT} 200 " in line
    assert f" ms {tokens} id=r-1" in line
    assert tape_id.partition(".")[2] not in bridge.log
    assert SECRET not in bridge.log
    assert "/health" not in bridge.log


def test_the_docs_are_there(bridge: Bridge) -> None:
    assert "swagger" in bridge.client.get("/docs").text
    paths = bridge.client.get("/openapi.json").json()["paths"]
    assert {"/metrics", CHAT, f"/tapes/{{tape_id}}{CHAT}"} <= set(paths)
    [tape_id] = [it for it in paths[f"/tapes/{{tape_id}}{CHAT}"]["post"]["parameters"] if it["in"] == "path"]
    assert tape_id["name"] == "tape_id"
    assert all("422" not in operation["responses"] for path in paths.values() for operation in path.values())


# Its end.


@pytest.mark.parametrize("workers", [1, 2])
def test_what_runs_at_the_end_of_the_grace_period_is_answered_503(
    start_bridge: StartBridge, slow_sidecar: ServerProcess, workers: int
) -> None:
    bridge = start_bridge("--grace-seconds", "0.5", "--workers", str(workers), a=slow_sidecar.address).wait_healthy()
    wait_until(lambda: bridge.log.count("sidecar a at") == workers)
    timer = threading.Timer(2, bridge.process.send_signal, [signal.SIGTERM])
    timer.start()
    assert error_of(bridge.chat(), 503)["code"] == "bridge_stopping"
    timer.join()
    assert bridge.process.wait(timeout=25) == 0
    assert "Traceback" not in bridge.log


@pytest.mark.parametrize(
    ("path", "signals"),
    [(CHAT, 1), ("/v1/completions", 1), ("/v1/messages", 1), (CHAT, 2)],
    ids=["chat", "completion", "message", "second signal"],
)
def test_a_stream_at_the_end_of_the_grace_period_ends_with_an_error(
    start_bridge: StartBridge, slow_sidecar: ServerProcess, path: str, signals: int
) -> None:
    grace = "0.3" if signals == 1 else "30"
    bridge = start_bridge("--grace-seconds", grace, a=slow_sidecar.address).wait_healthy()
    body = {"model": "toy", "max_tokens": 9, "stream": True}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    with bridge.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        for _ in range(signals):
            bridge.process.terminate()
            time.sleep(0.3)
        last = [line for line in lines if line][-2:]
    error = json.loads(last[-1].removeprefix("data: "))["error"]
    if path == "/v1/messages":
        assert last[0] == "event: error"
        assert (error["type"], error["details"]) == ("overloaded_error", {"error_code": "bridge_stopping"})
    else:
        assert (error["type"], error["code"]) == ("service_unavailable", "bridge_stopping")
    assert bridge.process.wait(timeout=25) == 0
    assert "in the middle of an answer" in bridge.log
    assert "Traceback" not in bridge.log


def test_the_log_has_no_tape_id_of_a_client_that_leaves(start_bridge: StartBridge, slow_sidecar: ServerProcess) -> None:
    bridge = start_bridge(a=slow_sidecar.address).wait_healthy()
    secret = "a." + "0123456789abcdef" * 2
    with pytest.raises(httpx.ReadTimeout):
        asyncio.run(leave(bridge, slow_sidecar, secret))
    wait_until(lambda: " 499 " in bridge.log)
    assert secret.removeprefix("a.") not in bridge.log


async def leave(bridge: Bridge, sidecar: ServerProcess, tape_id: str) -> None:
    async with dial(sidecar.address) as channel:
        await TapeServiceStub(channel).OpenTape(OpenTapeRequest(tape_id=tape_id))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    bridge.client.post(f"/tapes/{tape_id}{CHAT}", json=body, timeout=0.5)


def test_half_a_request_does_not_keep_it_from_ending(start_bridge: StartBridge, sidecar: ServerProcess) -> None:
    bridge = start_bridge("--grace-seconds", "1", a=sidecar.address).wait_healthy()
    host, port = bridge.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        time.sleep(0.2)
        bridge.process.terminate()
        assert bridge.process.wait(timeout=25) == 0
