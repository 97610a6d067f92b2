"""What a sidecar and a bridge tell of themselves: metrics, traces, logs; and how long a request may take."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support.engines import ManualEngine
from support.metrics import samples_of
from support.otlp_receiver import OtlpReceiver, otlp_receiver
from support.scripted import (
    RunningSidecar,
    SidecarProcess,
    call,
    run_sidecar,
    script,
    scripted_arguments,
    scripted_sidecar,
    sidecar_on,
    sidecar_process,
    tokens,
)
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.listen import ListenAddress
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_sidecar import metrics
from tokentape_sidecar.errors import EngineDead
from tokentape_sidecar.listener import AddressInUse
from tokentape_sidecar.metrics_server import metrics_served

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

ANYWHERE = ListenAddress("127.0.0.1", 0)
SECRET = "a prompt that nothing tells"
MODEL: dict[str, Any] = {"max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
GENERATE, FIND_CALLS = "tokentape.v1.GenerationService/GenerateMany", "tokentape.v1.TapeService/FindCalls"
IN_A_TRACE = {
    ("tokentape-bridge", "POST /v1/chat/completions"),
    *((service, name) for service in ("tokentape-bridge", "tokentape-sidecar") for name in (GENERATE, FIND_CALLS)),
}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}


# Metrics of the sidecar


async def scrape(running: RunningSidecar) -> dict[tuple[str, ...], float]:
    """The sidecar's metrics, by name (after the prefix) and label values."""
    with metrics_served(running.sidecar.measured, ANYWHERE) as address:
        async with httpx.AsyncClient() as http:
            values = samples_of(await http.get(f"http://{address}/metrics"))
    return {
        (name.removeprefix("tokentape:"), *labels): value
        for (name, *labels), value in values.items()
        if name.startswith("tokentape:")
    }


async def test_calls_tapes_and_prefixes_are_counted() -> None:
    answer = call(tokens(10, 11, finish="stop"))
    async with scripted_sidecar(answer, answer, call(tokens(10), tokens(11, delay_ms=60_000))) as running:
        client = running.client
        tape = await client.open_tape()
        first = await client.generate([1, 2, 3], tape_id=tape.tape_id)
        parent = types_pb2.CallReference(call_id=first.started.call_id)
        await client.generate([4], tape_id=tape.tape_id, parent=parent)
        with pytest.raises(Exception, match="vocabulary"):
            await client.generate([5000])
        stream = aiter(client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[7])))
        await anext(stream)
        await anext(stream)
        watching = asyncio.create_task(client.watch(tape))
        await eventually(lambda: running.sidecar.measured.tapes.held()[0].watcher_count)
        found = await scrape(running)
        watching.cancel()
    assert found["calls_running",] == 1
    assert found["calls_ended_total", "stop"] == 2
    assert found["calls_refused_total", "invalid_argument"] == 1
    assert found["prompt_tokens_total", "toy"] == 3 + 6 + 1
    assert found["generation_tokens_total", "toy"] == 5
    assert found["time_to_first_token_seconds_count", "toy"] == 2
    assert found["e2e_request_latency_seconds_bucket", "toy", "+Inf"] == 2
    assert found["tape_calls_total", "kept", ""] == 1
    assert found["tape_calls_total", "new", "unspecified"] == 1
    assert (found["tapes",], found["tapes_opened_total",], found["tape_watchers",]) == (1, 1, 1)
    assert found["tape_bytes",] == running.sidecar.measured.tapes.held()[0].size_bytes > 0
    assert found["limit", "max_running_calls"] == 8192
    assert found["serving",] == found["engine_state", "running"] == 1


async def test_the_state_of_the_engine_and_its_weights_are_told() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        assert (await scrape(running))["engine_state", "dead"] == 0
        engine.die(EngineDead("the engine died"))
        await eventually(lambda: running.sidecar.control.engine_dead)
        found = await scrape(running)
        assert (found["serving",], found["engine_state", "dead"], found["engine_state", "running"]) == (0, 1, 0)
        assert found["weight_changes_total",] == 0


async def test_only_metrics_are_served_there_and_a_taken_address_is_told() -> None:
    async with scripted_sidecar() as running:
        with metrics_served(running.sidecar.measured, ANYWHERE) as address:
            assert address is not None
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"http://{address}/")).status_code == 404
            taken = f"--metrics-listen: cannot listen on {address}: Address already in use"
            with (
                pytest.raises(AddressInUse, match=re.escape(taken)),
                metrics_served(running.sidecar.measured, address),
            ):
                pass


async def test_a_scrape_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_READ_SECONDS", 0.2)
    async with scripted_sidecar() as running:
        with metrics_served(running.sidecar.measured, ANYWHERE) as address:
            # Blocking the event loop, on which the metrics are read.
            answer = httpx.get(f"http://{address}/metrics")  # noqa: ASYNC210
            assert (answer.status_code, answer.text) == (503, "the sidecar's event loop does not answer\n")


def test_a_taken_metrics_address_stops_the_start(tmp_path: Path) -> None:
    with_taken = ["--listen", "127.0.0.1:0", "--metrics-listen", "192.0.2.1:1"]
    ended = run_sidecar(*scripted_arguments(script(), tmp_path), *with_taken)
    assert ended.returncode == 1
    assert ended.stderr.startswith("tokentape-sidecar: --metrics-listen: cannot listen on 192.0.2.1:1: ")


# Traces and logs, of a sidecar and a bridge as processes


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with otlp_receiver() as receiver:
        yield receiver


@asynccontextmanager
async def traced_sidecar(
    directory: Path, model_directory: Path, receiver: OtlpReceiver, *calls: dict[str, Any]
) -> AsyncGenerator[SidecarProcess]:
    content = script(*calls, repeat=True, **MODEL)
    options = ["--name", "a", "--log-format", "json", "--log-level", "debug"]
    options += ["--otlp-traces-endpoint", receiver.endpoint]
    async with sidecar_process(
        *scripted_arguments(content, directory, model_directory), *options, directory=directory
    ) as process:
        yield process


async def test_one_trace_goes_from_the_agent_to_the_sidecar_and_tells_no_secret(
    receiver: OtlpReceiver, tmp_path: Path, model_directory: Path, start_bridge: StartBridge
) -> None:
    async with traced_sidecar(tmp_path, model_directory, receiver, call(tokens(34, 2, finish="stop"))) as sidecar:
        options = ["--otlp-traces-endpoint", receiver.endpoint, "--log-format", "json"]
        bridge = start_bridge(*options, a=sidecar.address).wait_healthy()
        async with SidecarClient(sidecar.address, "a") as client:
            tape = await client.open_tape()
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "r-77", "x-tape-id": tape.tape_id}
        # With something to look for on the tape.
        turns = [*CHAT["messages"], {"role": "assistant", "content": "no"}, *CHAT["messages"]]
        answer = bridge.client.post("/v1/chat/completions", json={"messages": turns}, headers=headers)
        assert answer.status_code == 200
        await eventually(lambda: {(it.service, it.name) for it in receiver.of_trace(TRACE)} == IN_A_TRACE, 20)
        of_bridge = next(span for span in receiver.of_trace(TRACE) if span.name == "POST /v1/chat/completions")
        assert (of_bridge.service, of_bridge.parent_id) == ("tokentape-bridge", SPAN)
        assert of_bridge.attributes["http.response.status_code"] == 200
        assert of_bridge.attributes["tokentape.sidecar"] == "a"
        assert of_bridge.attributes["gen_ai.usage.output_tokens"] == 2
        # A path that names the tape is told as its route.
        under = bridge.client.post(f"/tapes/{tape.tape_id}/v1/chat/completions", json=CHAT)
        await eventually(lambda: any("{tape_id}" in span.name for span in receiver.spans), 20)
        refused = bridge.client.post("/v1/chat/completions", json=CHAT, headers={"x-tape-id": f"a.{'0' * 32}"})
        assert (under.status_code, refused.status_code) == (200, 404)
        await eventually(lambda: any(span.attributes.get("rpc.grpc.status_code") == 5 for span in receiver.spans), 20)
        sidecar_log, bridge_log = sidecar.output, bridge.log
    assert not any("/health" in span.text for span in receiver.spans)
    told = "\n".join(span.text for span in receiver.spans)
    for secret in (tape.tape_id, tape.reader_token, tape.tape_id.partition(".")[2], SECRET):
        assert secret not in told + sidecar_log + bridge_log
    _assert_spans_hang_together(receiver)
    lines = [json.loads(line) for line in sidecar_log.splitlines()]
    assert any(line["message"].startswith("serving toy on ") for line in lines)
    started = next(line for line in lines if line["message"].endswith("prompt tokens") and "request_id" in line)
    assert (started["request_id"], started["trace_id"]) == ("r-77", TRACE)
    of_request = next(json.loads(line) for line in bridge_log.splitlines() if "id=r-77" in line)
    assert (of_request["request_id"], of_request["trace_id"], of_request["level"]) == ("r-77", TRACE, "INFO")


def _assert_spans_hang_together(receiver: OtlpReceiver) -> None:
    """Each call's span at the sidecar is below the bridge's of the same call, and that below the request's."""
    by_id = {span.span_id: span for span in receiver.spans}
    at_sidecar = [span for span in receiver.of_trace(TRACE) if span.service == "tokentape-sidecar"]
    for span in at_sidecar:
        above = by_id[span.parent_id]
        assert (above.name, above.service) == (span.name, "tokentape-bridge")
        assert by_id[above.parent_id].name == "POST /v1/chat/completions"
        assert span.attributes["rpc.grpc.status_code"] == 0


async def test_a_receiver_that_is_not_there_holds_up_nothing(tmp_path: Path) -> None:
    options = [*scripted_arguments(script(call(tokens(10, finish="stop"))), tmp_path)]
    options += ["--otlp-traces-endpoint", "http://127.0.0.1:1"]
    async with sidecar_process(*options, directory=tmp_path) as process, SidecarClient(process.address) as client:
        assert (await client.generate()).token_ids() == [10]
        process.process.terminate()
        assert await process.wait(20) == 0
        assert "Traceback" not in process.output


def test_a_protocol_that_there_is_not_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    options = ["--listen", "127.0.0.1:0", "--otlp-traces-endpoint", "http://127.0.0.1:1"]
    ended = run_sidecar(*scripted_arguments(script(), tmp_path), *options)
    assert ended.returncode == 1
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'carrier-pigeon'; it can be grpc or http/protobuf" in ended.stderr


# Deadlines of requests


@pytest.fixture
async def slow(
    tmp_path: Path, model_directory: Path, start_bridge: StartBridge
) -> AsyncGenerator[tuple[Bridge, SidecarProcess]]:
    """A bridge whose requests may take 20 s, before a sidecar whose calls never end."""
    endless = call(tokens(34), tokens(35, delay_ms=60_000))
    content = script(endless, repeat=True, **MODEL)
    options = [*scripted_arguments(content, tmp_path, model_directory), "--name", "a", "--log-level", "debug"]
    async with sidecar_process(*options, directory=tmp_path) as process:
        yield start_bridge("--request-timeout", "20", a=process.address).wait_healthy(), process


def refusal(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 504, answer.text
    return answer.json()["error"]


async def test_a_request_ends_at_its_deadline_and_its_call_at_the_engine_D03(
    slow: tuple[Bridge, SidecarProcess],
) -> None:
    bridge, sidecar = slow
    began = time.monotonic()
    answer = bridge.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout": "0.5"})
    error = refusal(answer)
    assert time.monotonic() - began < 15
    assert (error["type"], error["code"]) == ("timeout", "deadline_exceeded")
    assert error["message"].startswith("the request took longer than the 0.5 s that it may")
    await eventually(lambda: "has ended: abort, 1 tokens sampled" in sidecar.output, 10)


async def test_a_stream_that_has_begun_ends_with_the_errors_frame_D03(slow: tuple[Bridge, SidecarProcess]) -> None:
    bridge, sidecar = slow
    headers = {"x-request-timeout": "1"}
    answer = bridge.client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
    assert answer.status_code == 200
    last = answer.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    await eventually(lambda: "has ended: abort, 1 tokens sampled" in sidecar.output, 10)


async def test_openais_client_asks_for_a_time_by_its_headers_and_does_not_try_again(
    slow: tuple[Bridge, SidecarProcess],
) -> None:
    bridge, sidecar = slow
    limit = {"x-request-timeout": "0.5"}
    with (
        openai.OpenAI(base_url=f"{bridge.client.base_url}/v1", api_key="none", default_headers=limit) as client,
        pytest.raises(openai.InternalServerError, match="took longer than the"),
    ):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    await eventually(lambda: "has ended: abort" in sidecar.output, 10)
    assert sidecar.output.count(" starts: ") == 1


async def test_messages_and_completions_have_deadlines_too(slow: tuple[Bridge, SidecarProcess]) -> None:
    bridge, _ = slow
    headers = {"x-request-timeout": "0.5"}
    message = {"model": "toy", "max_tokens": 5, **CHAT}
    answer = bridge.client.post("/v1/messages", json=message, headers=headers)
    assert refusal(answer)["type"] == "timeout_error"
    assert answer.headers["x-should-retry"] == "false"
    answer = bridge.client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert refusal(answer)["code"] == "deadline_exceeded"


async def test_a_time_that_is_none_is_refused(slow: tuple[Bridge, SidecarProcess]) -> None:
    bridge, _ = slow
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        answer = bridge.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


def test_the_bridges_own_limit_holds_whatever_a_request_asks_for(
    tmp_path: Path, model_directory: Path, start_bridge: StartBridge
) -> None:
    async def run() -> None:
        content = script(call(tokens(34), tokens(35, delay_ms=60_000)), repeat=True, **MODEL)
        options = [*scripted_arguments(content, tmp_path, model_directory), "--name", "a"]
        async with sidecar_process(*options, directory=tmp_path) as process:
            bridge = start_bridge("--request-timeout", "0.5", a=process.address).wait_healthy()
            answer = bridge.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout": "600"})
            assert "the 0.5 s that it may" in refusal(answer)["message"]
            values = samples_of(bridge.client.get("/metrics"))
            assert values["http_requests_total", "POST", "/v1/chat/completions", "504"] == 1
            assert values["tokentape:sidecar_calls_total", "a", "DEADLINE_EXCEEDED"] == 1
            assert values["tokentape:sidecar_calls_running", "a"] == 0
            assert values["tokentape:sidecar_serves", "a"] == 1
            assert values["vllm:time_to_first_token_seconds_count", "toy"] == 1

    asyncio.run(run())
