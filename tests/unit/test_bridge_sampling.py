from __future__ import annotations

import json
from typing import Any

import pytest

from tokentape.v1.types_pb2 import SamplingParameters, StructuredOutput
from tokentape_bridge.errors import ApiError
from tokentape_bridge.sampling import to_sampling_parameters
from tokentape_bridge.schemas import ChatCompletionRequest

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "max_tokens": 7,
    "min_tokens": 2,
    "n": 3,
    "seed": -5,
    "stop": ["x", "y"],
    "stop_token_ids": [4, 5],
    "ignore_eos": False,
    "logit_bias": {"5": -1, "6": 0.5},
    "bad_words": ["bad"],
    "allowed_token_ids": [1, 2],
    "logprobs": True,
    "top_logprobs": 0,
}


def sampling(**fields: object) -> SamplingParameters:
    return to_sampling_parameters(ChatCompletionRequest.model_validate({"messages": [], **fields}))


def test_every_field_arrives() -> None:
    expected = {key: value for key, value in EVERYTHING.items() if key not in {"logprobs", "logit_bias"}}
    assert sampling(**EVERYTHING) == SamplingParameters(**expected, logit_bias={5: -1, 6: 0.5})


def test_every_field_of_the_contract_can_be_asked_for() -> None:
    missing = {field.name for field in SamplingParameters.DESCRIPTOR.fields} - EVERYTHING.keys()
    # Asked for as response_format or structured_outputs; prompt log-probabilities are for plain completions.
    assert missing == {"structured_output", "prompt_logprobs"}


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(EVERYTHING), {"response_format": {"type": "text"}}])
def test_absent_and_null_stay_absent(fields: dict[str, Any]) -> None:
    assert sampling(**fields) == SamplingParameters()


def test_zero_is_not_absent() -> None:
    assert sampling(temperature=0).HasField("temperature")


def test_one_stop_string_is_a_list_of_one() -> None:
    assert list(sampling(stop="\n").stop) == ["\n"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
        ({"max_completion_tokens": 2**40}, 2**32 - 1),
    ],
)
def test_max_tokens(fields: dict[str, Any], expected: int) -> None:
    assert sampling(**fields).max_tokens == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}},
            StructuredOutput(json_schema=json.dumps({"type": "object"})),
        ),
    ],
)
def test_response_format(wanted: dict[str, Any], expected: StructuredOutput) -> None:
    assert sampling(response_format=wanted).structured_output == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"json": {"type": "object"}}, StructuredOutput(json_schema=json.dumps({"type": "object"}))),
        ({"json": '{"type": "object"}'}, StructuredOutput(json_schema='{"type": "object"}')),
        ({"json_object": True}, StructuredOutput(json_object=True)),
        ({"regex": "a+", "choice": None}, StructuredOutput(regex="a+")),
        ({"grammar": "root ::= 'a'"}, StructuredOutput(grammar="root ::= 'a'")),
        ({"choice": ["a", "b"]}, StructuredOutput(choices=StructuredOutput.Choices(values=["a", "b"]))),
        ({"structural_tag": "{}", "vendor": 1}, StructuredOutput(structural_tag="{}")),
    ],
)
def test_structured_outputs(wanted: dict[str, Any], expected: StructuredOutput) -> None:
    assert sampling(structured_outputs=wanted).structured_output == expected


@pytest.mark.parametrize("kind", [field.name for field in StructuredOutput.DESCRIPTOR.fields])
def test_every_form_of_the_contract_can_be_asked_for(kind: str) -> None:
    name = {"json_schema": "json", "choices": "choice"}.get(kind, kind)
    value = {"json_object": True, "choices": ["a"]}.get(kind, "a")
    assert sampling(structured_outputs={name: value}).structured_output.WhichOneof("form") == kind


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "grammar": "b"}),
        ("structured_outputs", {"regex": "\ud800"}),
        ("structured_outputs", {"choice": ["\ud800"]}),
        ("max_tokens", 0),
        ("max_completion_tokens", -7584),
        ("n", -1),
        ("min_tokens", -1),
        ("top_k", 2**40),
        ("seed", 2**70),
        ("stop_token_ids", [1, -1]),
        ("stop_token_ids", [2**32]),
        ("allowed_token_ids", [-1]),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("stop", ["\ud800"]),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
    ],
)
def test_what_the_contract_cannot_hold_is_named(field: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        sampling(**{field: value})
    assert (caught.value.param or "").partition(".")[0] == field
    assert caught.value.status == 400
