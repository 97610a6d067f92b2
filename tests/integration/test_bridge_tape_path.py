"""Clients that know nothing of tapes: the tape is in their base URL."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support.agent import user
from support.sidecar_client import SidecarClient

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

NAMES = ("a", "b")
OTHER = "a." + "1" * 32


def script(name: str) -> dict[str, Any]:
    return {
        "model": {"name": f"toy-{name}", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]},
        "calls": [{"steps": [{"text": f"I am {name}"}, {"token_ids": [2], "finish_reason": "stop"}]}],
        "repeat": True,
    }


@pytest.fixture(scope="module")
def sidecars(start_sidecar: StartSidecar) -> dict[str, ServerProcess]:
    return {name: start_sidecar(script(name), name=name) for name in NAMES}


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecars: dict[str, ServerProcess]) -> Bridge:
    bridge = start_bridge(**{name: sidecar.address for name, sidecar in sidecars.items()})
    deadline = time.monotonic() + 20
    while bridge.client.get("/health").json().get("sidecars") != dict.fromkeys(NAMES, "SERVING"):
        assert time.monotonic() < deadline, bridge.log
        time.sleep(0.05)
    return bridge


def post(bridge: Bridge, path: str, *, header: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if header is None else {"x-tape-id": header}
    return bridge.client.post(path, json={"messages": [user("Who?")], **fields}, headers=headers)


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("name", NAMES)
async def test_the_official_client_is_recorded_on_the_tape_of_its_base_url(
    bridge: Bridge, sidecars: dict[str, ServerProcess], name: str
) -> None:
    async with SidecarClient(sidecars[name].address, name) as sidecar:
        tape = await sidecar.open_tape()
        async with openai.AsyncOpenAI(
            base_url=f"http://{bridge.address}/tapes/{tape.tape_id}/v1", api_key="none", max_retries=0
        ) as client:
            (model,) = (await client.models.list()).data
            answer = await client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": "Who?"}]
            )
        entries = await sidecar.entries(tape)
    assert model.id == f"toy-{name}"
    assert answer.choices[0].message.content == f"I am {name}"
    extension = (answer.model_extra or {})["tokentape"]
    assert extension["tape_id"] == tape.tape_id
    assert entries[0].call_started.call_id == extension["call_id"]


async def test_the_same_tape_may_be_named_in_other_places_too(
    bridge: Bridge, sidecars: dict[str, ServerProcess]
) -> None:
    async with SidecarClient(sidecars["a"].address, "a") as sidecar:
        tape_id = (await sidecar.open_tape()).tape_id
    told = post(
        bridge, f"/tapes/{tape_id}/v1/chat/completions", header=tape_id, metadata={"tape_id": tape_id, "mine": "1"}
    )
    assert told.status_code == 200, told.text
    assert told.headers["x-tape-id"] == tape_id


@pytest.mark.parametrize(
    ("header", "metadata", "message"),
    [
        (None, {"tape_id": OTHER}, "metadata.tape_id: is not the tape of the URL's path"),
        (OTHER, {}, "the header x-tape-id: is not the tape of the URL's path"),
        (OTHER, None, "the header x-tape-id: is not the tape of the URL's path"),
        (None, {"tape_id": ""}, "metadata.tape_id: is not the tape of the URL's path"),
        (None, {"tape_id": 5}, "metadata.tape_id: must be a string"),
    ],
)
def test_two_tapes_for_one_call_are_refused_and_both_places_named(
    bridge: Bridge, header: str | None, metadata: dict[str, Any] | None, message: str
) -> None:
    path = f"/tapes/a.{secrets.token_hex(16)}/v1/chat/completions"
    told = post(bridge, path, header=header, metadata=metadata)
    assert error_of(told) == (400, "metadata.tape_id", message)


@pytest.mark.parametrize("tape_id", ["a", "a.xyz", "a." + "A" * 32, "a." + "0" * 31, "%20"])
@pytest.mark.parametrize("route", ["v1/chat/completions", "tokenize"])
def test_a_malformed_tape_id_is_refused_as_in_metadata(bridge: Bridge, tape_id: str, route: str) -> None:
    assert error_of(post(bridge, f"/tapes/{tape_id}/{route}")) == (
        400,
        "metadata.tape_id",
        "metadata.tape_id: is not of the form <sidecar name>.<32 hex digits>",
    )


@pytest.mark.parametrize(("header", "metadata"), [("", None), (None, {"tape_id": ""})])
def test_an_empty_tape_id_is_not_taken_for_none(
    bridge: Bridge, header: str | None, metadata: dict[str, Any] | None
) -> None:
    status, param, _ = error_of(post(bridge, "/v1/chat/completions", header=header, metadata=metadata))
    assert (status, param) == (400, "metadata.tape_id")


def test_models_of_a_malformed_tape_or_an_unknown_sidecar_are_refused(bridge: Bridge) -> None:
    for tape_id, problem in (("a.b", "is not of the form"), ("c." + "0" * 32, "no sidecar named")):
        status, param, message = error_of(bridge.client.get(f"/tapes/{tape_id}/v1/models"))
        assert (status, param) == (400, "metadata.tape_id")
        assert problem in message


def test_a_tape_that_is_not_there_is_not_found(bridge: Bridge) -> None:
    told = post(bridge, f"/tapes/{OTHER}/v1/chat/completions")
    assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")


def test_tokenize_under_a_tape_uses_its_sidecar(bridge: Bridge) -> None:
    path = f"/tapes/b.{secrets.token_hex(16)}/tokenize"
    assert post(bridge, path, model="toy-b").json()["count"] > 0
    refused = post(bridge, path, model="toy-a")
    assert (refused.status_code, json.loads(refused.text)["error"]["param"]) == (404, "model")


def test_a_path_that_is_no_route_stays_unknown(bridge: Bridge) -> None:
    assert bridge.client.get(f"/tapes/{OTHER}/v1/unknown").status_code == 404
    assert bridge.client.get(f"/tapes/{OTHER}").status_code == 404
