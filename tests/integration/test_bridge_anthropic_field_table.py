"""The Messages API's table in bridge/README.md, by what each field does: to the engine's call, or to the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.answering import AnsweringEngine, AnsweringSidecar, answering_sidecar
from support.field_table import CALL, cells, last_call, read_table, write_showing_tokenizer
from support.message_fields import BASE, EXAMPLES, ROUTES, SECTION
from support.messages import Json

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

PATHS = {"Messages": "/v1/messages", "Count tokens": "/v1/messages/count_tokens"}

HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[AnsweringSidecar]:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_showing_tokenizer(directory, model_directory)
    engine = AnsweringEngine(directory, f"Hi there\n{CALL}\n{CALL}", end=2, vocabulary_size=49152)
    with answering_sidecar(engine, "a") as running:
        yield running


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


def essence(response: httpx.Response) -> Any:
    """What an answer says, but for what is new in every answer."""
    if not response.headers["content-type"].startswith("application/json"):
        return response.headers["content-type"]
    body: Json = json.loads(response.text)
    call_id = body.get("tokentape", {}).get("call_id", "no call")
    return json.loads(response.text.replace(call_id, ""))


@pytest.mark.parametrize(("route", "field", "status"), cells(read_table(HERE, SECTION, ROUTES)))
def test_a_field_does_what_the_table_says(
    bridge: Bridge, sidecar: AnsweringSidecar, route: str, field: str, status: str
) -> None:
    example = EXAMPLES[field]
    base = BASE | ({"max_tokens": 200} if route == "Messages" else {})
    asked: list[Any] = []
    answers: list[httpx.Response] = []
    for body in (base | example.before, base | example.asked):
        answers.append(bridge.client.post(PATHS[route], json=body))
        asked.append(last_call(sidecar))
    before, after = answers
    assert before.status_code == 200, before.text
    changes = asked[0] != asked[1] or essence(before) != essence(after)
    match status:
        case "refused":
            assert after.status_code == 400
            assert after.json()["error"]["message"].startswith(f"{field}: ")
            assert bridge.client.post(PATHS[route], json=base | {field: None}).status_code == 200
        case "ignored":
            assert after.status_code == 200, after.text
            assert not changes
            assert f"'{field}'" in bridge.log
        case "passed":
            assert after.status_code == 200, after.text
            assert asked[0] != asked[1]
        case _:
            assert after.status_code == example.status, after.text
            assert changes
