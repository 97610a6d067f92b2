"""NeMo Gym's captured requests, sent to the bridge as they were: the answers have all that Gym reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

CAPTURES = Path(__file__).parents[1] / "data" / "gym"
ANSWER = [34, 1232, 216, 35, 446, 216, 37, 2]
SCRIPT = {
    "model": {"name": "toy-policy", "max_model_len": 4096, "vocab_size": 49152, "eos_token_ids": [2]},
    "calls": [{"steps": [{"token_ids": ANSWER[:3]}, {"token_ids": ANSWER[3:], "finish_reason": "stop"}]}],
    "repeat": True,
}


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, start_sidecar: StartSidecar) -> Bridge:
    return start_bridge(a=start_sidecar(SCRIPT).address).wait_healthy()


@pytest.mark.parametrize("capture", ["math", "multistep_tools", "main_math_and_multistep"])
def test_captured_requests_get_what_gym_reads(bridge: Bridge, capture: str) -> None:
    requests: list[dict[str, Any]] = json.loads((CAPTURES / f"{capture}.json").read_text())
    prompts: dict[str, list[int]] = {}
    for request in requests:
        response = bridge.client.request(
            request["method"],
            request["path"],
            headers=request["headers"],
            content=None if request["body"] is None else json.dumps(request["body"]),
        )
        assert response.status_code == 200, response.text
        match request["path"]:
            case "/v1/models":
                assert [model["id"] for model in response.json()["data"]] == ["toy-policy"]
            case "/v1/chat/completions":
                prompts[conversation(request["body"])] = ids_that_gym_takes(response.json())
            case "/tokenize":
                # Gym asks this only of servers that leave the ids out; it must be the chat's prompt.
                assert response.json()["tokens"] == prompts[conversation(request["body"])]
            case other:
                raise AssertionError(other)
    assert prompts


def conversation(body: Any) -> str:
    return json.dumps([body["messages"], body.get("tools")])


def ids_that_gym_takes(body: dict[str, Any]) -> list[int]:
    """Read `body` as Gym's vllm_model server does, in each of the three ways it knows; return the prompt's ids."""
    [choice] = body["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message["content"] == "2 + 3 = 5"
    assert choice["finish_reason"] == "stop"
    # With uses_reasoning_parser false, these would be a failed assertion.
    assert not message.get("reasoning_content")
    assert not message.get("reasoning")
    content = choice["logprobs"]["content"]
    assert [int(entry["token"].removeprefix("token_id:")) for entry in content] == ANSWER
    assert all(type(entry["logprob"]) is float for entry in content)
    assert choice["token_ids"] == message["generation_token_ids"] == ANSWER
    assert message["generation_log_probs"] == [entry["logprob"] for entry in content]
    assert message["prompt_token_ids"] == body["prompt_token_ids"]
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    return body["prompt_token_ids"]
