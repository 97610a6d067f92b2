"""A long history that is read, rendered and tokenised must not hold up anybody's stream."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

CHAT = "/v1/chat/completions"
STEP_MS = 20
MOST_SECONDS = 1.5
"""The longest pause of a stream that is not held up, on a machine that is busy with other tests."""


def script(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    model = {"name": name, "max_model_len": 2**20, "vocab_size": 49152, "eos_token_ids": [2]}
    return {"model": model, "calls": [{"steps": [*steps, {"token_ids": [2], "finish_reason": "stop"}]}], "repeat": True}


def long_history(turns: int, *, echoed_ids: int = 0) -> list[dict[str, Any]]:
    """Messages of about 200 tokens each; with `echoed_ids` each answer has a prompt of so many ids."""
    said = {"role": "user", "content": "so that it was for him to be with them " * 20}
    answer = {"role": "assistant", "content": said["content"]}
    if echoed_ids:
        answer |= {"prompt_token_ids": list(range(10_000, 10_000 + echoed_ids)), "generation_token_ids": [34, 2]}
    return [*itertools.chain.from_iterable([said, answer] for _ in range(turns)), said]


def arrivals(bridge: Bridge, until: threading.Event) -> list[float]:
    """Read streams until told to stop; return the time from each chunk of a stream to the next."""
    gaps: list[float] = []
    body = {"model": "streamed", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with httpx.Client(base_url=bridge.client.base_url, timeout=20) as client:
        while not until.is_set():
            with client.stream("POST", CHAT, json=body) as response:
                assert response.status_code == 200
                times = [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
            gaps += [after - before for before, after in itertools.pairwise(times)]
    return gaps


def test_long_histories_do_not_hold_up_a_stream(start_bridge: StartBridge, start_sidecar: StartSidecar) -> None:
    streamed = start_sidecar(
        script("streamed", *({"token_ids": [34], "delay_ms": STEP_MS} for _ in range(50))), name="s"
    )
    short = start_sidecar(script("short", {"token_ids": [34]}), name="t")
    bridge = start_bridge(s=streamed.address, t=short.address).wait_healthy()
    deadline = time.monotonic() + 20
    while len(bridge.client.get("/v1/models").json()["data"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)

    histories = [long_history(50), long_history(15, echoed_ids=20_000)]
    assert len(json.dumps(histories[1])) > 2_000_000
    gaps: list[float] = []
    enough = threading.Event()
    reader = threading.Thread(target=lambda: gaps.extend(arrivals(bridge, enough)))
    reader.start()
    try:
        for messages in histories * 5:
            answer = bridge.chat(messages=messages, model="short", return_token_ids=True).json()
            assert answer["usage"]["completion_tokens"] == 2
            assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"]) > 5_000
    finally:
        enough.set()
        reader.join()
    assert len(gaps) >= 50
    assert max(gaps) < MOST_SECONDS
