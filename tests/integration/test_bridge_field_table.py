"""The table of fields in bridge/README.md, by what each does: to the call that the engine gets, or to the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from support.answering import OTHER_TOKENS_SEED, AnsweringEngine, AnsweringSidecar, answering_sidecar
from support.field_examples import BASES, EXAMPLES, FIRST, QUESTION, SECOND, TAPE, Example, Json
from support.field_table import CALL, cells, last_call, read_table, write_showing_tokenizer

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

PATHS = {
    "Chat": "/v1/chat/completions",
    "Completions": "/v1/completions",
    "Tokenize": "/tokenize",
    "Detokenize": "/detokenize",
}
ANSWER = f"Hi<|endoftext|> there\n{CALL}\n{CALL}"

HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[AnsweringSidecar]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_showing_tokenizer(directory, model_directory)
    engine = AnsweringEngine(directory, ANSWER, end=2, vocabulary_size=49152, lora_names=("adapter",))
    with answering_sidecar(engine, "a") as running:
        yield running


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


def filled(value: Any, places: Json) -> Any:
    """`value` with what its marks stand for."""
    if isinstance(value, str):
        return places.get(value, value)
    if isinstance(value, dict):
        return {key: filled(item, places) for key, item in cast("Json", value).items()}
    return [filled(item, places) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def places_of(bridge: Bridge, sidecar: AnsweringSidecar) -> Json:
    """Open a tape on which two calls gave the same answer in different tokens."""
    tape_id = sidecar.run(sidecar.client.open_tape()).tape_id
    body = {"messages": [QUESTION], "return_token_ids": True, "metadata": {"tape_id": tape_id}}
    answers = [bridge.client.post(PATHS["Chat"], json=body | more).json() for more in ({}, {"seed": OTHER_TOKENS_SEED})]
    messages = [answer["choices"][0]["message"] for answer in answers]
    assert messages[0]["content"] == messages[1]["content"]
    prompt, completion = messages[0]["prompt_token_ids"], messages[0]["generation_token_ids"]
    assert completion != messages[1]["generation_token_ids"]
    return {
        TAPE: tape_id,
        "ANSWER": messages[0]["content"],
        FIRST: prompt,
        SECOND: completion,
        FIRST + SECOND: prompt + completion,
    }


def body_with(route: str, field: str, example: Example, places: Json) -> tuple[Json, Json]:
    """A request without and with the field."""
    without = BASES[route] | example.beside
    name = "messages" if field.startswith("messages[]") else field
    return filled(without, places), filled(without | {name: example.value}, places)


def essence(response: httpx.Response) -> Any:
    """What an answer says, but for what is new in every answer."""
    text = response.text
    if not response.headers["content-type"].startswith("application/json"):
        return [line.partition(":")[0] for line in text.splitlines()]
    body = json.loads(text)
    extension = body.get("tokentape", {})
    for fresh in (extension.get("call_id"), *extension.get("call_ids", [])):
        text = text.replace(str(fresh), "")
    return json.loads(text) | {"created": 0}


@pytest.mark.parametrize(("route", "field", "status"), cells(read_table(HERE)))
def test_a_field_does_what_the_table_says(
    bridge: Bridge, sidecar: AnsweringSidecar, route: str, field: str, status: str
) -> None:
    example = EXAMPLES[route][field]
    needs_tape = TAPE in json.dumps([example.value, example.beside])
    without, with_it = body_with(route, field, example, places_of(bridge, sidecar) if needs_tape else {})
    before = bridge.client.post(PATHS[route], json=without)
    asked_before = last_call(sidecar)
    after = bridge.client.post(PATHS[route], json=with_it)
    changes_call = last_call(sidecar) != asked_before
    path = field.replace("[]", ".1")
    match status:
        case "refused":
            assert (after.status_code, after.json()["error"]["param"]) == (400, path)
            assert bridge.client.post(PATHS[route], json=without | {field: None}).status_code == 200
        case "ignored":
            assert after.status_code == before.status_code == 200
            assert essence(after) == essence(before)
            assert not changes_call
            assert f"'{field}'" in bridge.log
        case "passed":
            assert after.status_code == 200, after.text
            assert changes_call
        case _:
            assert after.status_code == example.status, after.text
            assert changes_call or essence(after) != essence(before), after.text
            ignored_elsewhere = any(column.get(field) == "ignored" for column in read_table(HERE).values())
            assert ignored_elsewhere or f"'{field}'" not in bridge.log
