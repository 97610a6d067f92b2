"""A request's sampling fields as the contract's `SamplingParameters`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tokentape.v1.types_pb2 import SamplingParameters, StructuredOutput
from tokentape_bridge.errors import ApiError
from tokentape_bridge.forced_calls import structural_tag
from tokentape_bridge.sampling_fields import ResponseFormat, SamplingFields, StructuredOutputs
from tokentape_bridge.schemas import ChatCompletionRequest

_OTHERWISE = frozenset({"max_tokens", "logit_bias", "top_logprobs", "prompt_logprobs", "structured_output"})
"""Fields of the contract that a request has in another form; all others have the same name and meaning in both."""

_SAME: Sequence[FieldDescriptor] = [
    field for field in SamplingParameters.DESCRIPTOR.fields if field.name not in _OTHERWISE
]

_UINT32_MAX = 2**32 - 1


def to_sampling_parameters(request: ChatCompletionRequest) -> SamplingParameters:
    """Return what a chat says about sampling; what it leaves out stays absent.

    Raises `ApiError` for what the contract's types cannot hold and for a `max_tokens` below 1; other ranges are the
    sidecar's to judge.
    """
    sampling = common_sampling_parameters(request)
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    set_max_tokens(sampling, limit, getattr(request, limit))
    if request.logprobs and request.top_logprobs is not None:
        fit("top_logprobs", setattr, sampling, "top_logprobs", request.top_logprobs)
    parallel = request.parallel_tool_calls is not False
    if (tag := structural_tag(request.tools, request.tool_choice, parallel=parallel)) is not None:
        _refuse_second_form(sampling, "response_format", "a tool_choice that forces a call")
        sampling.structured_output.structural_tag = tag
    return sampling


def common_sampling_parameters(request: SamplingFields) -> SamplingParameters:
    """Return what chats and plain completions say alike; not the limit and the log-probabilities. Raises `ApiError`."""
    sampling = SamplingParameters()
    for field in _SAME:
        value: Any = getattr(request, field.name)
        if field.is_repeated:
            fit(field.name, getattr(sampling, field.name).extend, value or ())
        elif value is not None:
            fit(field.name, setattr, sampling, field.name, value)
    for token_id, bias in (request.logit_bias or {}).items():
        fit("logit_bias", _set_bias, sampling, token_id, bias)
    if request.response_format is not None:
        _set_response_format(sampling.structured_output, request.response_format)
    if request.structured_outputs is not None:
        _refuse_second_form(sampling, "structured_outputs", "response_format")
        _set_structured_outputs(sampling.structured_output, request.structured_outputs)
    return sampling


def set_max_tokens(sampling: SamplingParameters, field: str, value: int | None) -> None:
    """Set the limit to `value`, which the request has in `field`; the sidecar clamps what is too much.

    Raises `ApiError` where it is below 1.
    """
    if value is None:
        return
    if value < 1:
        raise ApiError(f"{field}: must be at least 1", param=field, code="invalid_value")
    sampling.max_tokens = min(value, _UINT32_MAX)


def fit(field: str, store: Callable[..., object], *values: object) -> None:
    """Call `store`, a protobuf setter. Raises `ApiError` naming `field` where its type cannot hold `values`."""
    try:
        store(*values)
    except (ValueError, TypeError):
        raise ApiError(f"{field}: is out of range or of the wrong kind", param=field, code="invalid_value") from None


def _set_bias(sampling: SamplingParameters, token_id: str, bias: float) -> None:
    sampling.logit_bias[int(token_id)] = bias


def _refuse_second_form(sampling: SamplingParameters, field: str, other: str) -> None:
    if sampling.HasField("structured_output"):
        raise ApiError(f"{field}: excludes {other}", param=field, code="invalid_value")


def _set_response_format(form: StructuredOutput, wanted: ResponseFormat) -> None:
    if wanted.type == "json_object":
        form.json_object = True
    elif wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            field = "response_format.json_schema.schema"
            raise ApiError(f"{field}: needed with the type json_schema", param=field, code="invalid_value")
        form.json_schema = json.dumps(wanted.json_schema.schema_)


def _set_structured_outputs(form: StructuredOutput, wanted: StructuredOutputs) -> None:
    given = wanted.model_dump(by_alias=True, exclude_none=True, include=set(StructuredOutputs.model_fields))
    if len(given) != 1:
        field, forms = "structured_outputs", ", ".join(StructuredOutputs.model_json_schema()["properties"])
        raise ApiError(f"{field}: give exactly one of {forms}", param=field, code="invalid_value")
    [(kind, value)] = given.items()
    field = f"structured_outputs.{kind}"
    match kind:
        case "json":
            text = value if isinstance(value, str) else json.dumps(value)
            fit(field, setattr, form, "json_schema", text)
        case "choice":
            fit(field, form.choices.values.extend, value)
        case _:
            fit(field, setattr, form, kind, value)
