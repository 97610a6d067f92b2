"""A real bridge whose sidecars come and go by `--sidecar-file`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.sidecar_client import SidecarClient

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

MODEL = {"name": "toy", "max_model_len": 2048, "vocab_size": 49152, "eos_token_ids": [2]}


def script(text: str, *, delay_ms: int = 0) -> dict[str, Any]:
    steps = [{"text": text}, {"token_ids": [2], "finish_reason": "stop", "delay_ms": delay_ms}]
    return {"model": MODEL, "calls": [{"steps": steps}], "repeat": True}


def replace(file: Path, sidecars: object) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(sidecars))
    draft.replace(file)


def served(bridge: Bridge) -> set[str]:
    body = bridge.client.get("/health").json()
    return {name for name, state in body.get("sidecars", {}).items() if state == "SERVING"}


async def tape_on(address: str, name: str) -> str:
    async with SidecarClient(address, name) as client:
        return (await client.open_tape()).tape_id


@pytest.fixture
def file(tmp_path: Path) -> Path:
    replace(tmp_path / "sidecars.json", {})
    return tmp_path / "sidecars.json"


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(_wait, condition)


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_sidecars_come_and_go_without_a_restart(
    start_sidecar: StartSidecar, start_bridge: StartBridge, file: Path
) -> None:
    one, two = start_sidecar(script("one"), name="one"), start_sidecar(script("two"), name="two")
    bridge = start_bridge("--sidecar-file", str(file))
    assert (bridge.chat().status_code, bridge.chat().json()["error"]["code"]) == (503, "sidecar_unavailable")

    replace(file, {"one": one.address})
    await until(lambda: served(bridge) == {"one"})
    tape = {"tape_id": await tape_on(one.address, "one")}
    assert bridge.chat(metadata=tape).json()["choices"][0]["message"]["content"] == "one"

    replace(file, {"one": one.address, "two": two.address})
    await until(lambda: served(bridge) == {"one", "two"})
    other = {"tape_id": await tape_on(two.address, "two")}
    assert bridge.chat(metadata=other).json()["choices"][0]["message"]["content"] == "two"

    replace(file, {"two": two.address})
    refused = bridge.chat(metadata=tape)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_sidecar")
    assert served(bridge) == {"two"}

    replace(file, ["two"])
    assert bridge.chat(metadata=other).is_success
    assert "cannot be used, the sidecars stay as they are: it does not hold a JSON object" in bridge.log


async def test_a_sidecar_that_has_left_serves_its_running_requests_to_their_end(
    start_sidecar: StartSidecar, start_bridge: StartBridge, file: Path
) -> None:
    slow = start_sidecar(script("slowly", delay_ms=2000), name="slow")
    replace(file, {"slow": slow.address})
    bridge = start_bridge("--sidecar-file", str(file))
    await until(lambda: served(bridge) == {"slow"})
    async with SidecarClient(slow.address, "slow") as client:
        tape = await client.open_tape()
        chatting = asyncio.create_task(asyncio.to_thread(bridge.chat, metadata={"tape_id": tape.tape_id}))
        while not any(entry.HasField("tokens_sampled") for entry in await client.entries(tape)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    replace(file, {})
    assert served(bridge) == set()
    assert (await chatting).json()["choices"][0]["message"]["content"] == "slowly"
    # Its connection is closed now: when the sidecar ends, the bridge does not even notice.
    await asyncio.sleep(0.5)
    slow.kill()
    await asyncio.sleep(0.5)
    assert "is gone" not in bridge.log
