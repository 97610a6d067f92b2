"""Several worker processes at one address."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from support.metrics import samples_of
from tokentape.held_directory import sweep
from tokentape_bridge.metrics_directory import PREFIX

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

CHAT = "/v1/chat/completions"
METRICS = "tokentape-bridge-metrics-*"
ANSWERED = ("http_requests_total", "POST", CHAT, "200")


def script(*steps: dict[str, Any]) -> dict[str, Any]:
    model = {"name": "toy", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
    return {"model": model, "calls": [{"steps": steps}], "repeat": True}


@pytest.fixture(scope="module")
def sidecar(start_sidecar: StartSidecar) -> ServerProcess:
    return start_sidecar(script({"token_ids": [34, 2], "finish_reason": "stop"}))


def workers_of(bridge: Bridge) -> list[psutil.Process]:
    return psutil.Process(bridge.process.pid).children()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def chat(bridge: Bridge) -> httpx.Response:
    """Ask over a connection of its own, which any worker may accept."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return httpx.post(f"{bridge.client.base_url}{CHAT}", json=body, timeout=20)


def scrape(bridge: Bridge) -> dict[tuple[str, ...], float]:
    return dict(samples_of(httpx.get(f"{bridge.client.base_url}/metrics")))


def test_all_serve_one_address_and_one_scrape_tells_of_all(start_bridge: StartBridge, sidecar: ServerProcess) -> None:
    bridge = start_bridge("--workers", "2", a=sidecar.address)
    # The ready file has been read: every worker serves.
    assert len(workers_of(bridge)) == 2
    assert bridge.log.count("Application startup complete") == 2
    eventually(lambda: bridge.log.count("sidecar a at") == 2)
    assert {chat(bridge).status_code for _ in range(20)} == {200}
    # Whichever worker is asked.
    for _ in range(6):
        told = scrape(bridge)
        assert told[ANSWERED] == 20
        assert told["vllm:generation_tokens_total", "toy"] == 40
        assert told["tokentape:http_requests_in_flight",] == 1


def test_a_worker_that_dies_is_replaced_and_what_it_counted_stays(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    steps = {"token_ids": [34]}, {"token_ids": [2], "finish_reason": "stop", "delay_ms": 300}
    bridge = start_bridge("--workers", "2", a=start_sidecar(script(*steps)).address).wait_healthy()
    eventually(lambda: bridge.log.count("sidecar a at") == 2)
    assert chat(bridge).status_code == 200
    victim = workers_of(bridge)[0]
    victim.kill()
    eventually(lambda: victim not in workers_of(bridge) and len(workers_of(bridge)) == 2)
    assert f"worker {victim.pid} ended with status -9; another takes its place" in bridge.log
    eventually(lambda: bridge.log.count("sidecar a at") == 3)
    statuses = Counter(chat(bridge).status_code for _ in range(5))
    assert statuses == {200: 5}
    told = scrape(bridge)
    assert told[ANSWERED] == 6
    assert told["tokentape:http_requests_in_flight",] == 1


def test_a_signal_to_the_parent_lets_requests_finish_and_leaves_no_worker(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    steps = {"token_ids": [34]}, {"token_ids": [2], "finish_reason": "stop", "delay_ms": 3_000}
    bridge = start_bridge("--workers", "2", a=start_sidecar(script(*steps)).address).wait_healthy()
    workers = workers_of(bridge)
    timer = subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -TERM {bridge.process.pid}"])
    assert bridge.chat().status_code == 200
    timer.wait()
    assert bridge.process.wait(timeout=60) == 0
    assert not any(worker.is_running() for worker in workers)
    with pytest.raises(httpx.ConnectError):
        bridge.client.get("/version")


def test_a_second_signal_ends_all_at_once(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    steps = {"token_ids": [34]}, {"token_ids": [2], "finish_reason": "stop", "delay_ms": 60_000}
    bridge = start_bridge("--workers", "2", a=start_sidecar(script(*steps)).address).wait_healthy()
    workers = workers_of(bridge)
    timer = subprocess.Popen(["sh", "-c", f"for i in 1 2; do sleep 0.7; kill -TERM {bridge.process.pid}; done"])
    with pytest.raises(httpx.HTTPError):
        bridge.chat()
    timer.wait()
    assert bridge.process.wait(timeout=60) == 0
    assert not any(worker.is_running() for worker in workers)


def test_workers_end_when_their_parent_is_killed_and_their_directory_is_swept(
    start_bridge: StartBridge, sidecar: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bridge = start_bridge("--workers", "2", a=sidecar.address)
    workers = workers_of(bridge)
    (directory,) = tmp_path.glob(METRICS)
    sweep(PREFIX, tempfile.gettempdir())
    assert directory.exists()
    bridge.kill()
    eventually(lambda: not any(worker.is_running() for worker in workers))
    with pytest.raises(httpx.ConnectError):
        bridge.client.get("/version")
    assert directory.exists()
    sweep(PREFIX, tempfile.gettempdir())
    assert list(tmp_path.glob(METRICS)) == []


def test_the_whole_group_may_be_signalled(tmp_path: Path) -> None:
    """As a terminal's Ctrl-C does: parent and workers all get it, which is one signal, not two."""
    program = str(Path(sys.executable).with_name("tokentape-bridge"))
    ready = tmp_path / "ready"
    command = [program, "--sidecar", "a=127.0.0.1:1", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--workers", "2"], stderr=log, process_group=0)
    try:
        eventually(ready.exists)
        workers = psutil.Process(process.pid).children()
        for one in (psutil.Process(process.pid), *workers):
            one.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert not any(worker.is_running() for worker in workers)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()
