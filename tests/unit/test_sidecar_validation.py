"""What is wrong in a request is refused by the name of its field."""

from __future__ import annotations

import math

import pytest

from support.engines import toy_model
from tokentape_sidecar.engine import Sampling, StructuredOutput
from tokentape_sidecar.errors import InvalidArgument
from tokentape_sidecar.validation import check_sampling, check_token_ids

MODEL = toy_model(vocabulary_size=1000)

BAD: list[tuple[Sampling, str]] = [
    (Sampling(temperature=-0.1), "temperature"),
    (Sampling(temperature=math.nan), "temperature"),
    (Sampling(temperature=math.inf), "temperature"),
    (Sampling(top_p=0.0), "top_p"),
    (Sampling(top_p=1.01), "top_p"),
    (Sampling(top_p=math.nan), "top_p"),
    (Sampling(top_k=-2), "top_k"),
    (Sampling(min_p=-0.1), "min_p"),
    (Sampling(min_p=1.1), "min_p"),
    (Sampling(presence_penalty=2.1), "presence_penalty"),
    (Sampling(presence_penalty=-2.1), "presence_penalty"),
    (Sampling(frequency_penalty=2.1), "frequency_penalty"),
    (Sampling(frequency_penalty=-2.1), "frequency_penalty"),
    (Sampling(repetition_penalty=0.0), "repetition_penalty"),
    (Sampling(repetition_penalty=math.inf), "repetition_penalty"),
    (Sampling(max_tokens=0), "max_tokens"),
    (Sampling(min_tokens=3, max_tokens=2), "min_tokens"),
    (Sampling(n=0), "n"),
    (Sampling(n=129), "n"),
    (Sampling(seed=2**63), "seed"),
    (Sampling(stop=("a", "")), "stop[1]"),
    (Sampling(stop_token_ids=(5, 1000)), "stop_token_ids[1]"),
    (Sampling(logit_bias={1000: 1.0}), "logit_bias"),
    (Sampling(logit_bias={5: 100.5}), "logit_bias[5]"),
    (Sampling(logit_bias={5: math.nan}), "logit_bias[5]"),
    (Sampling(bad_words=("",)), "bad_words[0]"),
    (Sampling(allowed_token_ids=(1000,)), "allowed_token_ids[0]"),
    (Sampling(top_logprobs=21), "top_logprobs"),
    (Sampling(prompt_logprobs=21), "prompt_logprobs"),
    (Sampling(structured_output=StructuredOutput("json_schema", "{")), "structured_output.json_schema"),
    (Sampling(structured_output=StructuredOutput("structural_tag", "")), "structured_output.structural_tag"),
    (Sampling(structured_output=StructuredOutput("regex", "")), "structured_output.regex"),
    (Sampling(structured_output=StructuredOutput("grammar", "")), "structured_output.grammar"),
    (Sampling(structured_output=StructuredOutput("choices", ())), "structured_output.choices"),
]

GOOD: list[Sampling] = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=5.0),
    Sampling(top_p=1.0),
    Sampling(top_k=0),
    Sampling(top_k=-1),
    Sampling(min_p=0.0),
    Sampling(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.1),
    Sampling(max_tokens=1, min_tokens=1),
    Sampling(min_tokens=0),
    Sampling(n=128),
    Sampling(seed=-(2**63)),
    Sampling(seed=2**63 - 1),
    Sampling(stop=("a",), stop_token_ids=(0, 999), logit_bias={999: -100.0}, allowed_token_ids=(0,)),
    Sampling(top_logprobs=20, prompt_logprobs=0),
    Sampling(structured_output=StructuredOutput("json_schema", "{}")),
    Sampling(structured_output=StructuredOutput("json_object")),
    Sampling(structured_output=StructuredOutput("choices", ("yes", "no"))),
]


@pytest.mark.parametrize(("sampling", "field"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_field_is_named(sampling: Sampling, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_sampling(sampling, MODEL)
    assert caught.value.field == f"sampling.{field}"
    assert str(caught.value).startswith(f"sampling.{field}: ")


def test_a_policys_bad_field_is_named_as_the_policys() -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling_policy\.top_p: "):
        check_sampling(Sampling(top_p=2.0), MODEL, field="sampling_policy")


@pytest.mark.parametrize("sampling", GOOD)
def test_what_an_engine_can_honour_passes(sampling: Sampling) -> None:
    check_sampling(sampling, MODEL)


def test_the_message_tells_the_limit_and_the_value_A04() -> None:
    with pytest.raises(InvalidArgument, match=r"must be at least 0 and at most 20, got 21"):
        check_sampling(Sampling(top_logprobs=21), MODEL)


@pytest.mark.parametrize(
    ("token_ids", "position", "token_id"), [([1000], 0, 1000), ([1, 2, 2**32 - 1], 2, 2**32 - 1), ([1, -1], 1, -1)]
)
def test_the_first_id_outside_of_the_vocabulary_is_named_A10(
    token_ids: list[int], position: int, token_id: int
) -> None:
    with pytest.raises(InvalidArgument, match=rf"^ids\[{position}\]: token id {token_id} .* of 1000 tokens"):
        check_token_ids("ids", token_ids, 1000)


@pytest.mark.parametrize("token_ids", [[], [0], [999], [0, 999]])
def test_ids_of_the_vocabulary_pass(token_ids: list[int]) -> None:
    check_token_ids("ids", token_ids, 1000)
