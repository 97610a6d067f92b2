"""The trainer's sampling parameters as a tape's policy, so that no agent samples from another distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokentape.v1 import types_pb2

_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


def sampling_policy(sampling_params: object) -> types_pb2.SamplingParameters:
    """Return the policy that pins what `sampling_params`, vLLM's `SamplingParams` or anything with its fields, says.

    A field that it has and that is not `None` (for lists: not empty) holds for every call of the rollout. Not pinned:
    `n`, which is the agent's business; `seed`, because one seed in every call would correlate them (and a seed of its
    own kills vLLM's CPU engine); `logprobs`, because the tape always has them. Nothing is changed in `sampling_params`.
    """
    policy = types_pb2.SamplingParameters()
    for name in _SCALARS:
        value: Any = getattr(sampling_params, name, None)
        if value is not None:
            setattr(policy, name, value)
    for name in _LISTS:
        values: Sequence[Any] | str | None = getattr(sampling_params, name, None)
        getattr(policy, name).extend([values] if isinstance(values, str) else values or ())
    biases: Mapping[int, float] | None = getattr(sampling_params, "logit_bias", None)
    policy.logit_bias.update(biases or {})
    return policy
