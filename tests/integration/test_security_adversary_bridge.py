"""The agent's sandbox as the adversary, through the bridge, whose key it holds: every route is tried."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest

from support.certificates import secret_file
from support.sidecar_client import SidecarClient, new_tape_id
from tokentape.access import Access
from tokentape.v1 import tape_pb2, types_pb2

Status = grpc.StatusCode
Json = dict[str, Any]

pytestmark = pytest.mark.timeout(120)

BRIDGE_KEY, DATA, CONTROL = "the-bridges-key", "the-data-token", "the-control-token"


@dataclass(frozen=True, slots=True)
class Served:
    """A guarded sidecar and its bridge, as processes; `http` shows the bridge's key."""

    sidecar: str
    token_file: Path
    http: httpx.Client

    @property
    def owner(self) -> SidecarClient:
        """Return a client as the trainer has it."""
        return SidecarClient(self.sidecar, "main", Access(self.token_file))

    def chat(self, tape_id: str, messages: list[Json], **fields: Any) -> httpx.Response:
        """Ask for a chat completion on a tape."""
        body = {"messages": messages, "return_token_ids": True, "metadata": {"tape_id": tape_id}, **fields}
        return self.http.post("/v1/chat/completions", json=body)


USER: Json = {"role": "user", "content": "What is 2+3?"}
# " inter" and "national": no tokenizer gives these ids for their text.
ODD = [843, 15439]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Served]:
    from integration.conftest import Bridge, ServerProcess, scripted_sidecar_command  # noqa: PLC0415 - a conftest

    directory = tmp_path_factory.mktemp("adversary")
    token_file, key_file = secret_file(directory / "token", DATA), secret_file(directory / "keys", BRIDGE_KEY)
    model = {"name": "toy", "max_model_len": 512, "vocab_size": 49152, "eos_token_ids": [2]}
    script = {
        "model": model,
        "calls": [{"steps": [{"token_ids": [*ODD, 2], "finish_reason": "stop"}]}],
        "repeat": True,
    }
    command = scripted_sidecar_command(directory, model_directory, script, "main", "127.0.0.1:0")
    with ServerProcess([*command, "--token-file", str(token_file)], directory) as sidecar:
        options = ["--api-key-file", str(key_file), "--sidecar-token-file", str(token_file)]
        command = ["tokentape-bridge", "--listen", "127.0.0.1:0", "--sidecar", f"main={sidecar.address}", *options]
        with Bridge(command, directory) as bridge:
            bridge.wait_healthy()
            bridge.client.headers["authorization"] = f"Bearer {BRIDGE_KEY}"
            yield Served(sidecar.address, token_file, bridge.client)


OPEN_ROUTES = {"/health", "/version", "/metrics"}
ROUTES = {
    ("get", "/health"),
    ("get", "/version"),
    ("get", "/metrics"),
    ("get", "/v1/models"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
}
"""Each has been judged: they append to the tape of the request, or tell nothing of any."""


def test_the_bridge_has_no_route_that_reads_seals_or_lists_tapes(served: Served) -> None:
    paths = cast("dict[str, Json]", served.http.get("/openapi.json").json()["paths"])
    routes = {(method, path.removeprefix("/tapes/{tape_id}")) for path, known in paths.items() for method in known}
    assert routes == ROUTES
    for method in ("GET", "DELETE", "PUT", "PATCH", "POST"):
        for path in (f"/tapes/{new_tape_id()}", "/tapes", f"/tapes/{new_tape_id()}/calls"):
            assert served.http.request(method, path).status_code in {404, 405}


@pytest.mark.parametrize("key", [None, "another", DATA])
def test_without_its_key_the_bridge_serves_nothing(served: Served, key: str | None) -> None:
    """The sidecar's token is no key either."""
    headers = {"authorization": "" if key is None else f"Bearer {key}"}
    for prefix in ("", f"/tapes/{new_tape_id()}"):
        for method, path in ROUTES:
            if prefix or path not in OPEN_ROUTES:
                assert served.http.request(method, prefix + path, headers=headers).status_code == 401, path


async def test_what_needs_no_key_tells_nothing_of_a_conversation(served: Served) -> None:
    async with served.owner as owner:
        tape = await owner.open_tape()
        answer = await asyncio.to_thread(served.chat, tape.tape_id, [{"role": "user", "content": "the-confidence"}])
    assert answer.status_code == 200
    secrets = (
        tape.tape_id,
        tape.reader_token,
        answer.json()["tokentape"]["call_id"],
        "the-confidence",
        BRIDGE_KEY,
        DATA,
    )
    for path in ("/health", "/version", "/metrics", "/docs", "/openapi.json"):
        told = served.http.get(path).text
        assert [secret for secret in secrets if secret in told] == [], path


async def test_a_conversation_of_another_tape_is_not_continued(served: Served) -> None:
    """Nor by its very ids. The bridge tells of it no id that the adversary has not sent."""
    async with served.owner as owner:
        theirs, own = await owner.open_tape(), await owner.open_tape()
        first = (await asyncio.to_thread(served.chat, theirs.tape_id, [USER])).json()
        history = [USER, first["choices"][0]["message"], USER]
        whole = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
        asked: list[Json] = [{}, {"required_prefix_token_ids": whole}]
        for fields in asked:
            ask = functools.partial(served.chat, own.tape_id, history, **fields)
            answer = (await asyncio.to_thread(ask)).json()
            assert answer["tokentape"]["parent_call_id"] is None
            assert answer["tokentape"]["prefix"] == "new"
            assert ODD[0] not in answer["prompt_token_ids"]
        continued = (await asyncio.to_thread(served.chat, theirs.tape_id, history)).json()
        assert continued["tokentape"]["prefix"] == "kept"
        assert ODD[0] in continued["prompt_token_ids"]


async def test_tokenize_tells_nothing_of_another_tape(served: Served) -> None:
    async with served.owner as owner:
        theirs, own = await owner.open_tape(), await owner.open_tape()
        first = (await asyncio.to_thread(served.chat, theirs.tape_id, [USER])).json()
        body = {"messages": [USER, first["choices"][0]["message"], USER]}

        async def tokens(tape_id: str) -> list[int]:
            answer = await asyncio.to_thread(served.http.post, f"/tapes/{tape_id}/tokenize", json=body)
            return cast("list[int]", answer.json()["tokens"])

        assert ODD[0] in await tokens(theirs.tape_id)
        assert ODD[0] not in await tokens(own.tape_id)


async def test_the_owners_sampling_and_limits_hold_through_the_bridge(served: Served) -> None:
    policy = types_pb2.SamplingParameters(temperature=0.5, top_p=0.9)
    async with served.owner as owner:
        tape = await owner.open_tape(sampling_policy=policy, limits=tape_pb2.TapeLimits(max_calls=1))
        wanted = {"temperature": 2.0, "top_p": 0.1, "seed": 7}
        assert (await asyncio.to_thread(lambda: served.chat(tape.tape_id, [USER], **wanted))).status_code == 200
        refused_call = await asyncio.to_thread(served.chat, tape.tape_id, [USER])
        (started, *_) = await owner.entries(tape)
    sampling = started.call_started.sampling
    assert (sampling.temperature, sampling.top_p) == (pytest.approx(0.5), pytest.approx(0.9))
    assert (refused_call.status_code, refused_call.json()["error"]["code"]) == (400, "limit_reached")


async def test_a_tape_that_is_sealed_takes_nothing_more(served: Served) -> None:
    async with served.owner as owner:
        tape = await owner.open_tape()
        await owner.seal(tape)
        answer = await asyncio.to_thread(served.chat, tape.tape_id, [USER])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "tape_sealed")
    assert tape.tape_id not in answer.text


async def test_guesses_at_the_bridge_find_no_tape(served: Served) -> None:
    async with served.owner as owner:
        tape = await owner.open_tape()
        for guess in (new_tape_id(), tape.tape_id[:-1], tape.tape_id.upper(), "main.*", f"other{tape.tape_id}", "../x"):
            answer = await asyncio.to_thread(served.chat, guess, [USER])
            assert answer.status_code in {400, 404}, guess
            assert tape.tape_id not in answer.text
        assert await owner.entries(tape) == []
