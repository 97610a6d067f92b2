"""The distribution that an engine sampled a token from, recomputed from a model's logits. Needs torch.

The order is vLLM's: structured output's mask; for raw log-probabilities that is all, since vLLM takes them behind that
mask. Then the mask of stop tokens below `min_tokens`; temperature (0 is greedy: nothing further is applied); `min_p`;
`top_k`; `top_p`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tokentape.v1 import types_pb2

_GREEDY = 1e-5
"""Temperatures below this are greedy, as for vLLM."""


def refusal(sampling: types_pb2.SamplingParameters) -> str | None:
    """Return which parameter's distribution cannot be recomputed here; `None`: none."""
    changed = {
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "logit_bias": bool(sampling.logit_bias),
        "bad_words": bool(sampling.bad_words),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
    }
    return next((name for name, is_changed in changed.items() if is_changed), None)


def processed(
    logits: Any, token_ids: Any, sampling: types_pb2.SamplingParameters, stop_token_ids: Collection[int]
) -> Any:
    """Return the logits of the distribution that was sampled from, -inf where a token was masked.

    `logits`: float32, P rows of the vocabulary's size, for the P tokens of one completion from its first on, structured
    output's mask applied. `token_ids`: int64, the P tokens that were sampled. `stop_token_ids`: all that end the call.
    A sampled token that falls just outside `min_p`, `top_k` or `top_p` here, by the noise of other kernels, is taken to
    be inside: if it was far outside, its log-probability tells.
    """
    logits = _without_stops(logits, sampling.min_tokens, stop_token_ids)
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if temperature < _GREEDY:
        return logits
    scaled = logits / temperature
    kept = scaled
    if sampling.min_p > 0:
        probabilities = kept.softmax(-1)
        floor = probabilities.amax(-1, keepdim=True) * sampling.min_p
        kept = kept.masked_fill(probabilities < floor, -float("inf"))
    if 0 < sampling.top_k < kept.shape[-1]:
        smallest = kept.topk(sampling.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < smallest, -float("inf"))
    if sampling.HasField("top_p") and sampling.top_p < 1:
        kept = _nucleus(kept, sampling.top_p)
    return kept.scatter(-1, token_ids[:, None], scaled.gather(-1, token_ids[:, None]))


def _without_stops(logits: Any, min_tokens: int, stop_token_ids: Collection[int]) -> Any:
    """Mask the stop tokens in the first `min_tokens` rows, but not where a grammar leaves nothing else."""
    if not min_tokens or not stop_token_ids:
        return logits
    masked = logits.clone()
    masked[:min_tokens, sorted(stop_token_ids)] = -float("inf")
    nothing_left = masked.isneginf().all(-1, keepdim=True)
    return logits.where(nothing_left, masked)


def _nucleus(logits: Any, top_p: float) -> Any:
    """Mask what lies outside the smallest set of tokens whose probability reaches `top_p`."""
    ascending, order = logits.sort(dim=-1)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    outside[:, -1] = False
    return logits.masked_fill(outside.scatter(-1, order, outside), -float("inf"))
