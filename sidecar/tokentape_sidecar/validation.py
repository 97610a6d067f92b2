"""What the sidecar checks in a call before the engine sees it. Every complaint names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from tokentape_sidecar.engine import Model, Sampling, StructuredOutput
from tokentape_sidecar.errors import InvalidArgument, NotFound
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits

_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0
_SEED_BITS = 63
_MAX_STRINGS = 256
"""The most of `stop`, and of `bad_words`."""
_MAX_STRING_CHARACTERS = 1024
"""The longest of them."""
_MAX_STOP_TOKEN_IDS = 1024
_MAX_BIASES = 4096
_MAX_STRUCTURE_CHARACTERS = 1024 * 1024
"""The longest schema, grammar or other form of an answer; of choices, all together."""


def check_token_ids(field: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    """Raise `InvalidArgument` where an id is not below `vocabulary_size`."""
    if len(token_ids) == 0 or (max(token_ids) < vocabulary_size and min(token_ids) >= 0):
        return
    position = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocabulary_size)
    raise InvalidArgument(
        f"{field}[{position}]", f"token id {token_ids[position]} is not in the vocabulary of {vocabulary_size} tokens"
    )


def check_length(field: str, text: str, most: int) -> None:
    """Raise `InvalidArgument` where `text` has more than `most` characters."""
    if len(text) > most:
        raise InvalidArgument(field, f"must have at most {most} characters, has {len(text)}")


def check_lora(name: str, model: Model) -> None:
    """Raise `NotFound` for an adapter that `model` has not; empty names none."""
    if name and name not in model.lora_names:
        there_are = ", ".join(model.lora_names) or "none"
        raise NotFound(f"lora_name: no LoRA adapter {name[:100]!r} is loaded; there are: {there_are}")


def check_sampling(
    sampling: Sampling, model: Model, *, field: str = "sampling", limits: Limits = DEFAULT_LIMITS
) -> None:
    """Raise `InvalidArgument` for the first field of `sampling` that no engine could honour, or that is too much.

    `field` is where the parameters stand in the request.
    """
    _check_ranges(field, sampling)
    _check_counts(field, sampling, model, limits)
    _check_numbers(field, sampling, model)
    vocabulary = model.vocabulary_size
    check_token_ids(f"{field}.stop_token_ids", sampling.stop_token_ids, vocabulary)
    check_token_ids(f"{field}.allowed_token_ids", sampling.allowed_token_ids, vocabulary)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocabulary:
            raise InvalidArgument(
                f"{field}.logit_bias", f"token id {token_id} is not in the vocabulary of {vocabulary} tokens"
            )
        _check_range(f"{field}.logit_bias[{token_id}]", bias, -_MAX_BIAS, _MAX_BIAS)
    _check_strings(f"{field}.stop", sampling.stop)
    _check_strings(f"{field}.bad_words", sampling.bad_words)
    _check_structured_output(field, sampling)


def _check_ranges(field: str, sampling: Sampling) -> None:
    _check_range(f"{field}.temperature", sampling.temperature, 0.0, math.inf)
    _check_range(f"{field}.top_p", sampling.top_p, 0.0, 1.0, above=True)
    _check_range(f"{field}.min_p", sampling.min_p, 0.0, 1.0)
    _check_range(f"{field}.presence_penalty", sampling.presence_penalty, -_MAX_PENALTY, _MAX_PENALTY)
    _check_range(f"{field}.frequency_penalty", sampling.frequency_penalty, -_MAX_PENALTY, _MAX_PENALTY)
    _check_range(f"{field}.repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, above=True)
    _check_range(f"{field}.top_k", sampling.top_k, -1, math.inf)
    _check_range(f"{field}.seed", sampling.seed, -(2**_SEED_BITS), 2**_SEED_BITS - 1)


def _check_counts(field: str, sampling: Sampling, model: Model, limits: Limits) -> None:
    max_top = min(model.max_top_logprobs, limits.max_top_logprobs)
    _check_range(f"{field}.max_tokens", sampling.max_tokens, 1, math.inf)
    _check_range(f"{field}.n", sampling.n, 1, limits.max_choices)
    _check_range(f"{field}.top_logprobs", sampling.top_logprobs, 0, max_top)
    _check_range(f"{field}.prompt_logprobs", sampling.prompt_logprobs, 0, max_top)
    if (
        sampling.min_tokens is not None
        and sampling.max_tokens is not None
        and sampling.min_tokens > sampling.max_tokens
    ):
        raise InvalidArgument(
            f"{field}.min_tokens", f"{sampling.min_tokens} is more than the {sampling.max_tokens} tokens there may be"
        )


def _check_numbers(field: str, sampling: Sampling, model: Model) -> None:
    """Check how many entries each list has, before anything looks at them one by one."""
    for name, most in (
        ("stop", _MAX_STRINGS),
        ("bad_words", _MAX_STRINGS),
        ("stop_token_ids", _MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", model.vocabulary_size),
        ("logit_bias", _MAX_BIASES),
    ):
        number = len(getattr(sampling, name))
        if number > most:
            raise InvalidArgument(f"{field}.{name}", f"must have at most {most} entries, has {number}")


def _check_range(field: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < low or value > high or (above and value == low):
        lower = f"above {low:g}" if above else f"at least {low:g}"
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidArgument(field, f"must be {lower}{upper}, got {value}")


def _check_strings(field: str, values: Sequence[str]) -> None:
    for position, value in enumerate(values):
        if not value:
            raise InvalidArgument(f"{field}[{position}]", "must not be empty")
        check_length(f"{field}[{position}]", value, _MAX_STRING_CHARACTERS)


def _check_structured_output(field: str, sampling: Sampling) -> None:
    output = sampling.structured_output
    if output is None:
        return
    field = f"{field}.structured_output.{output.form}"
    _check_structure_length(field, output)
    if output.form in {"json_schema", "structural_tag"}:
        try:
            json.loads(str(output.value))
        except ValueError as error:
            raise InvalidArgument(field, f"is not JSON: {error}") from None
        except RecursionError:
            raise InvalidArgument(field, "is nested too deeply") from None
    elif output.form != "json_object" and not output.value:
        raise InvalidArgument(field, "must not be empty")


def _check_structure_length(field: str, output: StructuredOutput) -> None:
    texts = (output.value,) if isinstance(output.value, str) else output.value
    characters = sum(map(len, texts))
    if characters > _MAX_STRUCTURE_CHARACTERS:
        raise InvalidArgument(field, f"must have at most {_MAX_STRUCTURE_CHARACTERS} characters, has {characters}")
