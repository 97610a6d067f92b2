"""A bridge before an engine whose answer is one text, whatever it is asked, and plain completions from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from support.answering import AnsweringEngine, AnsweringSidecar, answering_sidecar
from support.tokenizers import KINDS, TokenizerDirectory

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

Json = dict[str, Any]

PATH = "/v1/completions"

END = KINDS["qwen3"].stop_token_ids[0]

VOCABULARY = 151936

PEPPER = "\N{HOT PEPPER}"

TEXT = f"H\u00e9 {PEPPER} there, so."

PROMPT = "Once upon"


@pytest.fixture(scope="module")
def sidecar(tokenizer_directory: TokenizerDirectory) -> Iterator[AnsweringSidecar]:
    engine = AnsweringEngine(
        tokenizer_directory("qwen3"),
        TEXT,
        end=END,
        vocabulary_size=VOCABULARY,
        max_context_tokens=64,
        lora_names=("math",),
    )
    with answering_sidecar(engine, "a") as running:
        yield running


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, sidecar: AnsweringSidecar) -> Bridge:
    return start_bridge(a=sidecar.address).wait_healthy()


def complete(bridge: Bridge, prompt: Any = PROMPT, **fields: Any) -> Json:
    response = bridge.client.post(PATH, json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()
