"""`tokentape-sidecar --model`: raw log-probabilities, an engine that dies, a model that is not there."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import statistics
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from support.real_engine import CPU_ENVIRONMENT
from support.refusals import refused
from support.scripted import SidecarProcess, run_sidecar, sidecar_process
from support.sidecar_client import SidecarClient, sampled_on
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters
VLLM_OPTIONS = ["--", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"]
PROMPT = [1, 9690, 198, 2683, 359, 253]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[SidecarProcess]:
    arguments = ["--model", str(model_directory), "--served-model-name", "smol", "--logprobs-mode", "raw"]
    directory = tmp_path_factory.mktemp("sidecar")
    os.environ |= CPU_ENVIRONMENT
    async with sidecar_process(
        *arguments, "--grace-seconds", "5", *VLLM_OPTIONS, directory=directory, seconds=180
    ) as process:
        children = psutil.Process(process.process.pid).children(recursive=True)
        yield process
    for child in children:
        if child.is_running():
            child.kill()


def test_an_unknown_model_is_one_clear_line(tmp_path: Path) -> None:
    done = run_sidecar("--model", "./nope", "--listen", "127.0.0.1:0", seconds=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "tokentape-sidecar: --model: there is no directory ./nope"
    assert "Traceback" not in done.stderr
    assert done.stderr.count("tokentape-sidecar:") == 1


def test_a_directory_without_a_model_is_told_by_its_option(tmp_path: Path) -> None:
    done = run_sidecar("--model", str(tmp_path), "--listen", "127.0.0.1:0", seconds=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"tokentape-sidecar: --model: vLLM could not load {tmp_path}: ")


async def test_raw_logprobs_are_the_models_own_at_any_temperature(
    process: SidecarProcess, model_directory: Path
) -> None:
    import torch  # noqa: PLC0415 - seconds
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    loader: Any = AutoModelForCausalLM
    sampling = Sampling(temperature=0.5, max_tokens=32, ignore_eos=True)
    async with SidecarClient(process.address) as client:
        model = await client.generation.GetModel(generation_pb2.GetModelRequest())
        generated = await client.generate(PROMPT, sampling)
    assert (model.name, model.logprobs_mode) == ("smol", generation_pb2.LOGPROBS_MODE_RAW)
    tokens = torch.tensor([PROMPT + generated.token_ids()])
    with torch.no_grad():
        logits = loader.from_pretrained(str(model_directory), dtype=torch.bfloat16)(tokens).logits[0].float()
    own = tokens[0, len(PROMPT) :, None]

    def mean_difference(temperature: float) -> float:
        rows = (logits[len(PROMPT) - 1 : -1] / temperature).log_softmax(-1).gather(-1, own)[:, 0]
        return statistics.mean((rows - torch.tensor(generated.logprobs())).abs().tolist())

    assert mean_difference(1.0) < 0.06
    # They are not those of the distribution that was sampled from.
    assert mean_difference(0.5) > 0.12


async def test_an_engine_that_dies_ends_its_streams_and_says_so(process: SidecarProcess) -> None:
    """Last of this process: there is no engine afterwards."""
    async with SidecarClient(process.address) as client:
        assert await client.health_of() == health_pb2.HealthCheckResponse.SERVING
        tape = await client.open_tape()
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=PROMPT, sampling=Sampling(temperature=1.0, ignore_eos=True), tape_id=tape.tape_id
        )
        streams = [aiter(client.generation.Generate(request)) for _ in range(3)]
        for stream in streams:
            assert (await anext(stream)).HasField("started")
            assert (await anext(stream)).HasField("delta")
        core = next(
            child
            for child in psutil.Process(process.process.pid).children(recursive=True)
            if "EngineCore" in f"{child.name()} {child.cmdline()}"
        )
        core.kill()

        async def read_on(stream: Any) -> None:
            async for _ in stream:
                pass

        for stream in streams:
            with refused(grpc.StatusCode.UNAVAILABLE, "the engine died while it sampled this call"):
                await asyncio.wait_for(read_on(stream), 30)
        async with asyncio.timeout(10):
            async for update in client.health.Watch(health_pb2.HealthCheckRequest()):
                if update.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
        with refused(grpc.StatusCode.UNAVAILABLE, "the engine is dead"):
            await client.generate(PROMPT)
        # What it had sampled is still there to be read.
        entries = await client.entries(tape)
        failed = [entry.call_failed.call_id for entry in entries if entry.HasField("call_failed")]
        assert len(failed) == 3
        assert all(sampled_on(entries, call_id) for call_id in failed)
        assert all(math.isfinite(value) for entry in entries for value in entry.tokens_sampled.logprobs)
    process.signal(signal.SIGTERM)
    assert await process.wait(30) == 0


async def test_nothing_is_left_of_it(process: SidecarProcess) -> None:
    await eventually(lambda: process.process.poll() is not None)
    assert not [
        other for other in psutil.process_iter(["ppid", "cmdline"]) if other.info["ppid"] == process.process.pid
    ]
