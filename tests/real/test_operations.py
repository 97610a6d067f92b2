"""A sidecar tells of real vLLM what vLLM tells of itself: its metrics, its spans in a call's trace, its log."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from support.otlp_receiver import otlp_receiver
from support.real_engine import CPU_ENVIRONMENT
from support.scripted import sidecar_process
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2

pytestmark = pytest.mark.timeout(240)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_vllms_metrics_span_and_log_are_the_sidecars_too(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**CPU_ENVIRONMENT, "OTEL_BSP_SCHEDULE_DELAY": "50"}.items():
        monkeypatch.setenv(name, value)
    with otlp_receiver() as receiver:
        options = ["--model", str(model_directory), "--served-model-name", "smol", "--log-format", "json"]
        options += ["--metrics-listen", "127.0.0.1:0", "--otlp-traces-endpoint", receiver.endpoint]
        options += ["--", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"]
        async with sidecar_process(*options, directory=tmp_path, seconds=180) as process:
            metrics = json.loads((tmp_path / "ready.json").read_text())["metrics"]
            async with SidecarClient(process.address) as client:
                call = client.generation.Generate(
                    generation_pb2.GenerateRequest(
                        prompt_token_ids=[1, 9690, 198], sampling=types_pb2.SamplingParameters(max_tokens=5, n=2)
                    ),
                    metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"), ("x-request-id", "r-9")),
                )
                started, *_ = [event async for event in call]
            async with httpx.AsyncClient() as http:
                scraped = (await http.get(f"http://{metrics}/metrics")).text
            await eventually(lambda: len(receiver.of_trace(TRACE)) == 3, 30)
            process.process.terminate()
            assert await process.wait(60) == 0
            log = process.output
    of_sidecar, *of_vllm = sorted(receiver.of_trace(TRACE), key=lambda span: span.name != CALL)
    assert (of_sidecar.name, of_sidecar.parent_id) == (CALL, SPAN)
    assert [span.name for span in of_vllm] == ["llm_request"] * 2
    for span in of_vllm:
        assert span.parent_id == of_sidecar.span_id
        assert span.service == "tokentape-sidecar"
        assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
        assert started.started.call_id in str(span.attributes["gen_ai.request.id"])
    assert "vllm:generation_tokens_total{" in scraped
    assert 'tokentape:generation_tokens_total{model_name="smol"} 10.0' in scraped
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert any(line["logger"].startswith("vllm.") for line in lines)
    # What vLLM logs is JSON in its other processes too: no line is of its own format.
    assert not [line for line in log.splitlines() if line.startswith(("INFO ", "WARNING ", "(EngineCore"))]


CALL = "tokentape.v1.GenerationService/Generate"
