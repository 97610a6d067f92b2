"""Structured output's masks, recomputed with a real tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokentape.v1 import types_pb2
from tokentape_executor._grammar import GrammarError, Grammars

pytestmark = [
    # torch's and transformers' own, on import; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Form = types_pb2.StructuredOutput
VOCABULARY = 49152
END = 2
TAG = {"type": "tag", "begin": "<call>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</call>"}


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    tokenizers: Any = AutoTokenizer
    return tokenizers.from_pretrained(str(model_directory))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCABULARY)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), END]


def mask(grammars: Grammars, token_ids: Sequence[int], form: Form) -> Any:
    import torch  # noqa: PLC0415

    return grammars.mask(torch.zeros(len(token_ids), VOCABULARY), token_ids, form, [END])


@pytest.mark.parametrize(
    ("form", "text", "wrong"),
    [
        (Form(regex="[0-9]{3}x"), "123x", "y"),
        (Form(json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})), '{"a": 7}', "["),
        (Form(json_object=True), '{"a": [true]}', "x"),
        (Form(grammar='root ::= "yes" | "no"'), "yes", "maybe"),
        (Form(choices=Form.Choices(values=['a "quoted"\n', "é"])), 'a "quoted"\n', "b"),
        (Form(structural_tag=json.dumps({"type": "structural_tag", "format": TAG})), "<call>42</call>", "no"),
    ],
)
def test_what_a_form_allows_is_left_and_what_it_forbids_is_masked(
    grammars: Grammars, tokenizer: Any, form: Form, text: str, wrong: str
) -> None:
    token_ids = encoded(tokenizer, text)
    masked = mask(grammars, token_ids, form)
    assert all(masked[row, token_id] == 0 for row, token_id in enumerate(token_ids))
    assert masked[0, encoded(tokenizer, wrong)[0]] == -math.inf
    assert masked[0].isfinite().sum() < VOCABULARY / 2

    forbidden = [encoded(tokenizer, wrong)[0], *token_ids[1:]]
    masked = mask(grammars, forbidden, form)
    assert masked[0, forbidden[0]] == -math.inf
    assert masked[1:].isfinite().all()


def test_after_the_end_nothing_is_masked(grammars: Grammars, tokenizer: Any) -> None:
    token_ids = [*encoded(tokenizer, "123x"), 500, 501]
    masked = mask(grammars, token_ids, Form(regex="[0-9]{3}x"))
    assert masked[-2:].isfinite().all()


@pytest.mark.parametrize("form", [Form(regex="("), Form(json_schema="{"), Form(structural_tag="{}"), Form()])
def test_a_form_that_does_not_compile_is_told(grammars: Grammars, form: Form) -> None:
    with pytest.raises(GrammarError, match="structured output: "):
        mask(grammars, [5], form)


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(GrammarError, match="need the model's tokenizer"):
        Grammars(None, VOCABULARY)
