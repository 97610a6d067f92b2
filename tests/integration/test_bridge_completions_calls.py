"""Plain completions as calls: one for each prompt, on its tape, and what ends them all."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support.answering import AnsweringSidecar
from support.completions import END, PATH, PROMPT, TEXT, VOCABULARY, Json, bridge, complete, sidecar
from support.sidecar_client import OpenedTape, SidecarClient, prompts_on
from support.tokenizers import TokenizerDirectory
from tokentape.v1 import types_pb2

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

__all__ = ["bridge", "sidecar"]


@pytest.mark.parametrize("where", ["path", "metadata", "header", "user"])
async def test_each_prompt_is_a_call_of_the_tape(bridge: Bridge, sidecar: AnsweringSidecar, where: str) -> None:
    tape = sidecar.run(sidecar.client.open_tape())
    prefix, headers, fields = "", {}, dict[str, Any]()
    match where:
        case "path":
            prefix = f"/tapes/{tape.tape_id}"
        case "metadata":
            fields = {"metadata": {"tape_id": tape.tape_id}}
        case "header":
            headers = {"x-tape-id": tape.tape_id}
        case _:
            fields = {"user": tape.tape_id}
    response = bridge.client.post(f"{prefix}{PATH}", json={"prompt": [[5], [6, 7]], **fields}, headers=headers)
    call_ids = response.json()["tokentape"]["call_ids"]
    assert response.headers["x-tape-id"] == tape.tape_id
    assert response.headers["x-call-ids"] == ", ".join(call_ids)
    entries = sidecar.run(sidecar.client.entries(tape))
    prompts = prompts_on(entries)
    assert [prompts[call_id] for call_id in call_ids] == [[5], [6, 7]]
    [*causes] = [it.call_started.split_cause for it in entries if it.HasField("call_started")]
    assert causes == [types_pb2.SPLIT_CAUSE_NEW_CONVERSATION] * 2


def test_ids_of_many_calls_are_no_header(bridge: Bridge) -> None:
    response = bridge.client.post(PATH, json={"prompt": [[5]] * 200})
    assert len(response.json()["tokentape"]["call_ids"]) == 200
    assert "x-call-ids" not in response.headers


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_any_number_of_choices_is_refused_at_once(bridge: Bridge, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "n": 2**32 - 1}
    response = bridge.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_an_adapter_is_a_model_of_its_own_name(bridge: Bridge, sidecar: AnsweringSidecar) -> None:
    assert complete(bridge, model="math")["model"] == "math"
    assert sidecar.calls[-1].lora_name == "math"
    assert complete(bridge, model="toy")["model"] == "toy"
    assert sidecar.calls[-1].lora_name == ""
    assert bridge.client.post(PATH, json={"prompt": "a", "model": "toy:math"}).status_code == 404


def test_the_openai_client_completes(bridge: Bridge) -> None:
    with openai.OpenAI(base_url=f"{bridge.client.base_url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="toy", prompt=[PROMPT, "And"], n=2, logprobs=1, echo=True)
        assert [choice.text for choice in whole.choices] == [PROMPT + TEXT] * 2 + ["And" + TEXT] * 2
        chunks = list(client.completions.create(model="toy", prompt=PROMPT, stream=True))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="toy", prompt=PROMPT, suffix="x")
        assert caught.value.param == "suffix"


SLOW: Json = {"steps": [{"token_ids": [9707]}, {"token_ids": [END], "delay_ms": 30_000, "finish_reason": "stop"}]}

MODEL: Json = {"name": "toy", "max_model_len": 64, "vocab_size": VOCABULARY, "eos_token_ids": [END]}

BROKEN: Json = {"steps": [{"token_ids": [9707]}, {"error": "out of luck", "delay_ms": 300}]}


async def test_a_client_that_leaves_ends_the_calls_of_all_prompts(
    start_bridge: StartBridge, start_sidecar: StartSidecar, tokenizer_directory: TokenizerDirectory
) -> None:
    script = {"model": MODEL, "calls": [SLOW, SLOW]}
    process = start_sidecar(script, tokenizer=tokenizer_directory("qwen3"))
    bridge = start_bridge(a=process.address).wait_healthy()
    async with SidecarClient(process.address, "a") as sidecar:
        tape = await sidecar.open_tape()
        body: Json = {"prompt": ["a", "b"], "stream": True, "user": tape.tape_id}
        async with (
            httpx.AsyncClient(base_url=bridge.client.base_url, timeout=20) as client,
            client.stream("POST", PATH, json=body) as response,
        ):
            assert response.status_code == 200
            await anext(response.aiter_lines())
        ends: list[int] = []
        async with asyncio.timeout(10):
            while len(ends) < 2:
                await asyncio.sleep(0.05)
                ends = await endings(sidecar, tape)
    assert ends == [types_pb2.FINISH_REASON_ABORT] * 2


async def endings(sidecar: SidecarClient, tape: OpenedTape) -> list[int]:
    """Why the choices on a tape ended."""
    entries = await sidecar.entries(tape)
    ended = [entry.choice_finished for entry in entries if entry.HasField("choice_finished")]
    return [finished.completion.finish_reason for finished in ended]


@pytest.fixture
def failing(start_bridge: StartBridge, start_sidecar: StartSidecar, tokenizer_directory: TokenizerDirectory) -> Bridge:
    """A bridge whose engine's first call is slow, and whose second fails."""
    script = {"model": MODEL, "calls": [SLOW, BROKEN]}
    sidecar = start_sidecar(script, tokenizer=tokenizer_directory("qwen3"))
    return start_bridge(a=sidecar.address).wait_healthy()


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_fails_ends_the_others(failing: Bridge, stream: bool) -> None:
    response: httpx.Response = failing.client.post(PATH, json={"prompt": ["a", "b"], "stream": stream})
    if not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        return
    assert response.status_code == 200
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
