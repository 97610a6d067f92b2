"""What one sees of a running sidecar with `buf curl` and nothing else: no proto files, no code."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from support.scripted import call, script, scripted_arguments, sidecar_process, tokens

BUF = str(Path(sys.executable).with_name("buf"))
PLAIN = ["curl", "--protocol", "grpc", "--http2-prior-knowledge"]


async def curl(directory: Path, *arguments: str) -> str:
    # Away from the checkout, whose protos buf would find.
    done = await asyncio.to_thread(
        subprocess.run,
        [BUF, *PLAIN, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_values(text: str) -> list[object]:
    """The JSON values that follow one another in `text`."""
    decoder, values = json.JSONDecoder(), list[object]()
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values


async def test_buf_curl_lists_services_and_streams_tokens_as_readable_json(tmp_path: Path) -> None:
    logprobs = [{"42": -4.25}, {"7": -0.125}]
    steps = call(
        tokens(42, 7, logprobs=logprobs, weight_version="3"), tokens(645, delay_ms=50, finish="stop"), expect=[1, 2, 3]
    )
    arguments = scripted_arguments(script(steps, eos_token_ids=[645]), tmp_path)
    async with sidecar_process(*arguments, directory=tmp_path) as process:
        url = f"http://{process.address}"
        services = await curl(tmp_path, "--list-services", url)
        assert set(services.split()) == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "tokentape.v1.GenerationService",
            "tokentape.v1.TapeService",
        }
        methods = await curl(tmp_path, "--list-methods", url)
        assert "tokentape.v1.GenerationService/Generate" in methods
        assert "tokentape.v1.TapeService/WatchTape" in methods
        request = '{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}'
        streamed = await curl(tmp_path, "--data", request, f"{url}/tokentape.v1.GenerationService/Generate")
    started, *rest = json_values(streamed)
    assert isinstance(started, dict)
    assert started["started"]["callId"].startswith("call-")
    assert started["started"]["promptTokenCount"] == 3
    assert started["started"]["maxTokens"] == 8
    assert rest == [
        {"delta": {"tokenIds": [42, 7], "logprobs": [-4.25, -0.125], "weightVersion": "3"}},
        {"delta": {"tokenIds": [645], "logprobs": [-1], "weightVersion": "3"}},
        {"finished": {"finishReason": "FINISH_REASON_STOP", "tokenCount": 3}},
    ]


async def test_buf_curl_shows_a_refusal_with_its_status_and_field(tmp_path: Path) -> None:
    arguments = scripted_arguments(script(vocab_size=100), tmp_path)
    async with sidecar_process(*arguments, directory=tmp_path) as process:
        url = f"http://{process.address}/tokentape.v1.GenerationService/Generate"
        done = await asyncio.to_thread(
            subprocess.run,
            [BUF, *PLAIN, "--data", '{"prompt_token_ids": [100]}', url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert done.returncode != 0
    assert json.loads(done.stderr) == {
        "code": "invalid_argument",
        "message": "prompt_token_ids[0]: token id 100 is not in the vocabulary of 100 tokens",
    }
