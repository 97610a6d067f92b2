"""The table of fields in bridge/README.md: every field of every request's model is in it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from support.field_examples import EXAMPLES
from support.field_table import read_table
from tokentape_bridge.schemas import ChatCompletionRequest, Message, TokenizeRequest
from tokentape_bridge.text_schemas import CompletionRequest, DetokenizeRequest

MODELS: dict[str, type[BaseModel]] = {
    "Chat": ChatCompletionRequest,
    "Completions": CompletionRequest,
    "Tokenize": TokenizeRequest,
    "Detokenize": DetokenizeRequest,
}


def names(model: type[BaseModel]) -> set[str]:
    own = set(model.model_fields)
    return own | {f"messages[].{name}" for name in Message.model_fields} if "messages" in own else own


@pytest.mark.parametrize("route", MODELS)
def test_the_table_has_the_fields_of_the_models(checkout: Path, route: str) -> None:
    table = read_table(checkout)
    assert {field for field, status in table[route].items() if status} == names(MODELS[route])


@pytest.mark.parametrize("route", MODELS)
def test_each_field_has_an_example(checkout: Path, route: str) -> None:
    assert {field for field, status in read_table(checkout)[route].items() if status} == EXAMPLES[route].keys()


def test_statuses_are_the_four(checkout: Path) -> None:
    table = read_table(checkout)
    assert {status for column in table.values() for status in column.values()} == {
        "",
        "supported",
        "passed",
        "ignored",
        "refused",
    }
