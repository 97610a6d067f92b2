"""Log-probabilities and bytes of sampled tokens, as an OpenAI client gets them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

PEPPER = "\N{HOT PEPPER}"
PEPPER_BYTES = [0xF0, 0x9F, 0x8C, 0xB6]


@pytest.fixture(scope="module")
def pepper(model_directory: Path) -> list[int]:
    """The ids of a character that SmolLM2 has no token for: some of its bytes each."""
    ids = Tokenizer.from_file(str(model_directory / "tokenizer.json")).encode(PEPPER, add_special_tokens=False).ids
    assert len(ids) > 1
    return ids


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, start_sidecar: StartSidecar, pepper: list[int]) -> Bridge:
    steps: list[dict[str, Any]] = [
        {"token_ids": [token_id], "logprobs": [{str(token_id): -0.5 - i}]} for i, token_id in enumerate([*pepper, 2])
    ]
    script = {
        "model": {"name": "toy", "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]},
        "calls": [{"steps": steps}],
        "repeat": True,
    }
    return start_bridge(a=start_sidecar(script).address).wait_healthy()


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 0}, {"top_logprobs": None}], ids=["absent", "0", "null"])
def test_each_token_has_its_logprob_however_top_logprobs_is_left_out_A02(
    bridge: Bridge, pepper: list[int], top: dict[str, Any]
) -> None:
    [choice] = bridge.chat(logprobs=True, **top).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5 - i for i in range(len(pepper) + 1)]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_top_logprobs_without_logprobs_are_refused_A02(bridge: Bridge) -> None:
    answer = bridge.chat(logprobs=False, top_logprobs=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


def test_a_character_in_several_tokens_keeps_its_bytes_A08(bridge: Bridge, pepper: list[int]) -> None:
    [choice] = bridge.chat(logprobs=True, return_token_ids=True).json()["choices"]
    assert choice["message"]["content"] == PEPPER
    assert choice["token_ids"] == [*pepper, 2]
    content = choice["logprobs"]["content"]
    assert len(content) == len(pepper) + 1
    assert [byte for entry in content[:-1] for byte in entry["bytes"]] == PEPPER_BYTES


def test_a_character_that_is_cut_keeps_the_bytes_it_has_A08(bridge: Bridge, pepper: list[int]) -> None:
    cut = len(pepper) - 1
    [choice] = bridge.chat(logprobs=True, return_token_ids=True, max_tokens=cut).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == pepper[:cut]
    spelled = [byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]]
    assert spelled == PEPPER_BYTES[: len(spelled)]
    assert 0 < len(spelled) < len(PEPPER_BYTES)
    assert choice["message"]["content"].count("\N{REPLACEMENT CHARACTER}") <= 1


def test_an_alternative_that_was_ruled_out_is_told_as_openai_tells_it(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    step = {"token_ids": [42], "logprobs": [{"42": -0.1, "7": "-Infinity"}], "finish_reason": "stop"}
    script = {"model": {"name": "toy", "vocab_size": 49152}, "calls": [{"steps": [step]}], "repeat": True}
    bridge = start_bridge(a=start_sidecar(script).address).wait_healthy()

    [choice] = bridge.chat(logprobs=True, top_logprobs=2).json()["choices"]
    [entry] = choice["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([-0.1, -9999.0])
    body = {"prompt": "What?", "logprobs": 2}
    [choice] = bridge.client.post("/v1/completions", json=body).json()["choices"]
    assert sorted(choice["logprobs"]["top_logprobs"][0].values()) == pytest.approx([-9999.0, -0.1])
