"""The bridge as a process: its start without a sidecar, a sidecar's coming and going, clients that leave, its end."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tokentape.channel import dial
from tokentape.v1.tape_pb2 import GetTapeRequest, GetTapeResponse, OpenTapeRequest
from tokentape.v1.tape_pb2_grpc import TapeServiceStub
from tokentape.v1.types_pb2 import FINISH_REASON_ABORT

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

TAPE_ID = "a." + "fedcba9876543210" * 2


def script(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    model = {"name": name, "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
    return {"model": model, "calls": [{"steps": steps}], "repeat": True}


ANSWERS = {"token_ids": [34, 2], "finish_reason": "stop"}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def wait_until_unhealthy(bridge: Bridge) -> None:
    deadline = time.monotonic() + 5
    while bridge.client.get("/health").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_serves_errors_without_a_sidecar_and_comes_good_with_it(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    address = free_address()
    bridge = start_bridge(a=address)
    for response in (
        bridge.client.get("/health", timeout=1),
        bridge.client.get("/v1/models", timeout=1),
        bridge.client.post("/tokenize", json={"prompt": "x"}, timeout=1),
        bridge.client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]}, timeout=1),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "sidecar_unavailable"
    assert bridge.client.get("/version", timeout=1).status_code == 200
    start_sidecar(script("late", ANSWERS), listen=address)
    assert bridge.wait_healthy().chat().json()["model"] == "late"


def test_it_follows_a_restarted_sidecar_to_another_model_and_tokenizer(
    start_bridge: StartBridge, start_sidecar: StartSidecar, model_directory: Path, tmp_path: Path
) -> None:
    address = free_address()
    first = start_sidecar(script("first", ANSWERS), listen=address)
    bridge = start_bridge(a=address).wait_healthy()
    before = bridge.chat(return_token_ids=True).json()
    first.kill()
    wait_until_unhealthy(bridge)
    assert bridge.chat().status_code == 503

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    start_sidecar(script("second", ANSWERS), listen=address, tokenizer=tmp_path)
    after = bridge.wait_healthy().chat("2 + 3 = 5", return_token_ids=True).json()
    assert (before["model"], after["model"]) == ("first", "second")
    assert after["prompt_token_ids"] == [34, 1232, 216, 35, 446, 216, 37]


async def test_a_client_that_leaves_aborts_its_call(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(script("slow", {"token_ids": [34]}, {"token_ids": [35], "delay_ms": 60_000}))
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    async with dial(sidecar.address) as channel:
        tapes = TapeServiceStub(channel)
        opened = await tapes.OpenTape(OpenTapeRequest(tape_id=TAPE_ID))
        with pytest.raises(httpx.ReadTimeout):
            bridge.client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "hi"}], "metadata": {"tape_id": TAPE_ID}},
                timeout=0.5,
            )
        deadline = time.monotonic() + 2
        tape = GetTapeResponse()
        while not any(entry.HasField("choice_finished") for entry in tape.entries):
            assert time.monotonic() < deadline, tape
            tape = await tapes.GetTape(GetTapeRequest(tape_id=TAPE_ID, reader_token=opened.reader_token))
    [finished] = [entry.choice_finished for entry in tape.entries if entry.HasField("choice_finished")]
    assert finished.completion.finish_reason == FINISH_REASON_ABORT
    assert finished.completion.token_count == 1
    assert "ERROR" not in bridge.log
    assert bridge.client.get("/health").status_code == 200


def test_untagged_requests_go_round_a_dead_sidecar_and_tapes_to_their_own(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    bridge = start_bridge(a=free_address(), b=start_sidecar(script("toy", ANSWERS), name="b").address).wait_healthy()
    assert [bridge.chat().status_code for _ in range(3)] == [200, 200, 200]
    assert bridge.chat(metadata={"tape_id": "b." + "0" * 32}).status_code == 404
    assert bridge.chat(metadata={"tape_id": "a." + "0" * 32}).status_code == 503
    states = bridge.client.get("/health").json()["sidecars"]
    assert states["b"] == "SERVING"
    assert states["a"].startswith("UNAVAILABLE")


def test_a_request_names_the_sidecar_by_its_model(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    addresses = {name: start_sidecar(script(f"model-{name}", ANSWERS), name=name).address for name in ("a", "b")}
    bridge = start_bridge(**addresses).wait_healthy()
    deadline = time.monotonic() + 10
    while len(bridge.client.get("/v1/models").json()["data"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for model in ("model-b", "model-a"):
        assert bridge.chat(model=model).json()["model"] == model
    assert "model-a, model-b" in bridge.chat(model="other").json()["error"]["message"]


def test_a_sidecar_of_another_name_is_reported(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    bridge = start_bridge(a=start_sidecar(script("toy", ANSWERS), name="b").address)
    deadline = time.monotonic() + 10
    while "is named 'b', not 'a'" not in (answer := bridge.client.get("/health")).text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer.status_code == 503
    assert "is named 'b', not 'a'" in bridge.log


def test_a_failing_engine_is_an_error_and_not_a_shorter_answer(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    bridge = start_bridge(
        a=start_sidecar(script("toy", {"token_ids": [34]}, {"error": "out of memory", "delay_ms": 50})).address
    ).wait_healthy()
    response = bridge.chat()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "choices" not in response.json()


def test_choices_are_told_apart(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    steps = [
        {"index": 0, "token_ids": [34]},
        {"index": 1, "token_ids": [35, 446], "finish_reason": "length"},
        {"index": 0, "token_ids": [216, 2], "finish_reason": "stop", "delay_ms": 30},
    ]
    bridge = start_bridge(a=start_sidecar(script("toy", *steps)).address).wait_healthy()
    body = bridge.chat(n=2, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in body["choices"]] == [[34, 216, 2], [35, 446]]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["2 ", "3 ="]
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(
    start_bridge: StartBridge, start_sidecar: StartSidecar, stop_signal: signal.Signals
) -> None:
    sidecar = start_sidecar(script("toy", {"token_ids": [34]}, ANSWERS | {"delay_ms": 1_000}))
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    timer = subprocess.Popen(["sh", "-c", f"sleep 0.4; kill -{stop_signal.value} {bridge.process.pid}"])
    answer = bridge.chat()
    timer.wait()
    assert answer.status_code == 200
    assert bridge.process.wait(timeout=10) == 0
    with pytest.raises(httpx.ConnectError):
        bridge.client.get("/health")


def test_a_taken_port_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [str(Path(sys.executable).with_name("tokentape-bridge")), "--sidecar", "a=127.0.0.1:1"]
        ended = subprocess.run([*command, "--listen", address], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"tokentape-bridge: cannot listen at {address}: Address already in use\n"


def test_a_ready_file_that_cannot_be_written_is_one_line_and_status_1(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tokentape-bridge")), "--sidecar", "a=127.0.0.1:1"]
    options = ["--listen", "127.0.0.1:0", "--ready-file", str(tmp_path)]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"tokentape-bridge: --ready-file {tmp_path} cannot be written: Is a directory\n"


def test_idle_connections_outlive_a_client_s_pool(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    bridge = start_bridge(a=start_sidecar(script("toy", ANSWERS)).address).wait_healthy()
    connection = http.client.HTTPConnection(bridge.address, timeout=5)
    with contextlib.closing(connection):
        connection.connect()
        opened = connection.sock
        for pause in (0, 7):
            # uvicorn's default closes idle connections after 5 s.
            time.sleep(pause)
            connection.request("GET", "/version")
            assert connection.getresponse().read()
            assert connection.sock is opened
    assert "GET /version" not in bridge.log
