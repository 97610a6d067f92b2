"""A request's sampling fields as the contract's `SamplingParameters`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tokentape.v1.types_pb2 import SamplingParameters, StructuredOutput
from tokentape_bridge.errors import ApiError
from tokentape_bridge.forced_calls import structural_tag
from tokentape_bridge.schemas import ChatCompletionRequest, ResponseFormat

_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
    "seed",
    "ignore_eos",
)
"""Fields of the same name and meaning on both sides."""

_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
"""Likewise, repeated."""

_UINT32_MAX = 2**32 - 1


def to_sampling_parameters(request: ChatCompletionRequest) -> SamplingParameters:
    """Return what `request` says about sampling; what it leaves out stays absent.

    Raises `ApiError` for what the contract's types cannot hold and for a `max_tokens` below 1; other ranges are the
    sidecar's to judge.
    """
    sampling = SamplingParameters()
    for name in _SCALARS:
        value: object = getattr(request, name)
        if value is not None:
            fit(name, setattr, sampling, name, value)
    for name in _LISTS:
        values: Sequence[object] = getattr(request, name) or ()
        fit(name, getattr(sampling, name).extend, values)
    for token_id, bias in (request.logit_bias or {}).items():
        fit("logit_bias", _set_bias, sampling, token_id, bias)
    if (max_tokens := _max_tokens(request)) is not None:
        sampling.max_tokens = max_tokens
    if request.logprobs and request.top_logprobs is not None:
        fit("top_logprobs", setattr, sampling, "top_logprobs", request.top_logprobs)
    if request.response_format is not None:
        _set_structured_output(sampling.structured_output, request.response_format)
    parallel = request.parallel_tool_calls is not False
    if (tag := structural_tag(request.tools, request.tool_choice, parallel=parallel)) is not None:
        if sampling.HasField("structured_output"):
            raise ApiError("response_format: excludes a tool_choice that forces a call", param="response_format")
        sampling.structured_output.structural_tag = tag
    return sampling


def fit(field: str, store: Callable[..., object], *values: object) -> None:
    """Call `store`, a protobuf setter. Raises `ApiError` naming `field` where its type cannot hold `values`."""
    try:
        store(*values)
    except (ValueError, TypeError):
        raise ApiError(f"{field}: is out of range or of the wrong kind", param=field, code="invalid_value") from None


def _set_bias(sampling: SamplingParameters, token_id: str, bias: float) -> None:
    sampling.logit_bias[int(token_id)] = bias


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    """Return the newer of the two names of the limit if it is there; the sidecar clamps what is too much."""
    for field in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(request, field)
        if value is None:
            continue
        if value < 1:
            raise ApiError(f"{field}: must be at least 1", param=field, code="invalid_value")
        return min(value, _UINT32_MAX)
    return None


def _set_structured_output(form: StructuredOutput, wanted: ResponseFormat) -> None:
    if wanted.type == "json_object":
        form.json_object = True
    elif wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            field = "response_format.json_schema.schema"
            raise ApiError(f"{field}: needed with the type json_schema", param=field, code="invalid_value")
        form.json_schema = json.dumps(wanted.json_schema.schema_)
