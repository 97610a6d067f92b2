"""LoRA adapters by model name, from the request to the tape and the samples; what they sample is a script's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support.agent import Json, message_of, user
from support.refusals import refused
from support.scripted import call, scripted_sidecar, tokens
from support.sidecar_client import OpenedTape, SidecarClient
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.receipt import SplitCause

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

ANSWER = call(tokens(10, 11, finish="stop"))
ADAPTERS = {"a": ["math", "code"], "b": ["code", "poems"]}
CHAT = "/v1/chat/completions"


async def sample(client: SidecarClient, tape: OpenedTape | None, **fields: Any) -> str:
    """Make a call and return its id."""
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id if tape else "", **fields)
    events = [event async for event in client.generation.Generate(request)]
    assert events[-1].WhichOneof("event") == "finished"
    return events[0].started.call_id


# The sidecar


async def test_the_tape_says_which_adapter_sampled_each_call() -> None:
    async with scripted_sidecar(ANSWER, repeat=True, lora_names=["math", "code"]) as running:
        client = running.client
        tape = await client.open_tape()
        for name in ("math", "", "code"):
            await sample(client, tape, lora_name=name, anchor="same")
        await client.seal(tape)
        entries = await client.entries(tape)
        found = await client.tapes.FindCalls(tape_pb2.FindCallsRequest(tape_id=tape.tape_id, anchors=["same"]))
    assert [call.lora_name for call in found.calls] == ["math", "", "code"]
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    assert [sample.lora_name for sample in assembler.trajectory().samples] == ["math", "", "code"]


@pytest.mark.parametrize(("names", "there_are"), [(["math", "code"], "math, code"), ([], "none")])
async def test_an_unknown_adapter_is_refused_with_those_there_are(names: list[str], there_are: str) -> None:
    async with scripted_sidecar(ANSWER, lora_names=names) as running:
        tape = await running.client.open_tape()
        message = f"^lora_name: no LoRA adapter 'maths' is loaded; there are: {there_are}$"
        with refused(grpc.StatusCode.NOT_FOUND, message):
            await sample(running.client, tape, lora_name="maths")
        assert await running.client.entries(tape) == []


async def test_a_call_goes_on_from_one_of_its_own_adapter_only() -> None:
    async with scripted_sidecar(ANSWER, repeat=True, lora_names=["math", "code"]) as running:
        tape = await running.client.open_tape()
        parent = types_pb2.CallReference(call_id=await sample(running.client, tape, lora_name="math"))
        for name in ("code", ""):
            with refused(
                grpc.StatusCode.INVALID_ARGUMENT, f"^lora_name: the parent was sampled with 'math', not '{name}'"
            ):
                await sample(running.client, tape, lora_name=name, parent=parent)
        await sample(running.client, tape, lora_name="math", parent=parent)


# The bridge


def script(lora_names: list[str]) -> dict[str, Any]:
    return {
        "model": {
            "name": "toy",
            "max_model_len": 256,
            "vocab_size": 49152,
            "eos_token_ids": [2],
            "lora_names": lora_names,
        },
        "calls": [{"steps": [{"text": "Yes."}, {"token_ids": [2], "finish_reason": "stop"}]}],
        "repeat": True,
    }


@pytest.fixture(scope="module")
def sidecars(start_sidecar: StartSidecar) -> dict[str, ServerProcess]:
    return {name: start_sidecar(script(adapters), name=name) for name, adapters in ADAPTERS.items()}


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecars: dict[str, ServerProcess]) -> Bridge:
    bridge = start_bridge(**{name: sidecar.address for name, sidecar in sidecars.items()})
    deadline = time.monotonic() + 20
    while bridge.client.get("/health").json().get("sidecars") != dict.fromkeys(ADAPTERS, "SERVING"):
        assert time.monotonic() < deadline, bridge.log
        time.sleep(0.05)
    return bridge


def ask(bridge: Bridge, model: str, *messages: Json, tape: OpenedTape | None = None) -> Json:
    fields: Json = {"metadata": {"tape_id": tape.tape_id}} if tape else {}
    response = bridge.client.post(CHAT, json={"messages": messages or [user("Is it?")], "model": model, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_adapters_are_listed_with_their_model_as_parent(bridge: Bridge) -> None:
    listed = bridge.client.get("/v1/models").json()["data"]
    assert {card["id"]: card["parent"] for card in listed} == {
        "toy": None,
        "math": "toy",
        "code": "toy",
        "poems": "toy",
    }
    assert len(listed) == 4
    assert {card["max_model_len"] for card in listed} == {256}


async def test_a_tape_lists_the_adapters_of_its_own_sidecar(bridge: Bridge, sidecars: dict[str, ServerProcess]) -> None:
    async with SidecarClient(sidecars["b"].address, "b") as client:
        tape = await client.open_tape()
    listed = bridge.client.get(f"/tapes/{tape.tape_id}/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["toy", "code", "poems"]


@pytest.mark.parametrize("model", ["math", "poems"])
def test_a_request_goes_to_a_sidecar_that_has_the_adapter(bridge: Bridge, model: str) -> None:
    # Only one of the two has it, and the other would refuse it.
    assert [ask(bridge, model)["model"] for _ in range(4)] == [model] * 4


async def test_a_tapes_sidecar_without_the_adapter_does_not_serve_it(
    bridge: Bridge, sidecars: dict[str, ServerProcess]
) -> None:
    async with SidecarClient(sidecars["a"].address, "a") as client:
        tape = await client.open_tape()
        assert ask(bridge, "math", tape=tape)["model"] == "math"
        response = bridge.chat(model="poems", metadata={"tape_id": tape.tape_id})
        entries = await client.entries(tape)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert [entry.call_started.lora_name for entry in entries if entry.HasField("call_started")] == ["math"]


@pytest.mark.parametrize("model", ["toy:math", "maths", "math:toy"])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_other_names_are_not_found_and_the_served_ones_told(bridge: Bridge, model: str, path: str) -> None:
    response = bridge.client.post(path, json={"messages": [user("Hello")], "model": model})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404, "model")
    assert error["message"].endswith("served: code, math, poems, toy")


async def test_with_another_adapter_a_new_sample_begins(bridge: Bridge, sidecars: dict[str, ServerProcess]) -> None:
    history: list[Json] = [user("Is it?")]
    bodies: list[Json] = []
    async with SidecarClient(sidecars["a"].address, "a") as client:
        tape = await client.open_tape()
        for model in ("math", "math", "code", "code", "toy"):
            bodies.append(ask(bridge, model, *history, tape=tape))
            history += [message_of(bodies[-1]), user("Sure?")]
        await client.seal(tape)
        entries = await client.entries(tape)
    told = [body["tokentape"]["split_cause"] for body in bodies]
    assert told == ["new_conversation", None, "lora_changed", None, "lora_changed"]
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    samples = assembler.trajectory().samples
    assert [(sample.lora_name, len(sample.actions)) for sample in samples] == [("math", 2), ("code", 2), ("", 1)]
    assert [sample.split_cause for sample in samples][1:] == [SplitCause.LORA_CHANGED] * 2


async def test_of_equal_answers_that_of_the_same_adapter_is_continued(
    bridge: Bridge, sidecars: dict[str, ServerProcess]
) -> None:
    question = user("Is it?")
    async with SidecarClient(sidecars["a"].address, "a") as client:
        tape = await client.open_tape()
        first = {model: ask(bridge, model, question, tape=tape) for model in ("math", "code", "toy")}
        for model, body in first.items():
            turn: list[Json] = [question, message_of(body), user("Sure?")]
            prompt = bridge.client.post(
                "/tokenize", json={"messages": turn, "model": model, "metadata": {"tape_id": tape.tape_id}}
            ).json()
            later = ask(bridge, model, *turn, tape=tape)
            assert later["tokentape"]["parent_call_id"] == body["tokentape"]["call_id"]
            assert prompt["count"] == later["usage"]["prompt_tokens"]
