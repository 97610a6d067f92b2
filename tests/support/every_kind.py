"""Every kind of call, and what `Generate` makes of it: the measure of other ways to make calls."""

from __future__ import annotations

from support.scripted import Json, call, scripted_sidecar, tokens
from support.sidecar_client import Generated
from tokentape.v1.types_pb2 import SamplingParameters

_TWO_CHOICES = [tokens(10), tokens(20, choice=1), tokens(11, finish="stop"), tokens(21, choice=1, finish="length")]
_VERSIONS = [tokens(10, weight_version="1"), tokens(11, 12, weight_version="2"), tokens(13, finish="stop")]
_TOP = [tokens(10, 11, finish="stop", logprobs=[{"10": -0.5, "12": -0.25}, {"11": -0.75, "13": -2.0}])]
_PROMPT: Json = {"prompt_logprobs": [{"2": -0.5}, {"3": -1.5, "9": -0.25}], "steps": [tokens(10, finish="stop")]}

KINDS: list[tuple[Json, SamplingParameters]] = [
    (call(*_TWO_CHOICES), SamplingParameters(n=2)),
    (call(*_VERSIONS), SamplingParameters()),
    (call(*_TOP), SamplingParameters(top_logprobs=2)),
    (_PROMPT, SamplingParameters(prompt_logprobs=1)),
    (call({"text": "one END two", "finish_reason": "stop"}), SamplingParameters(stop=["END"])),
]
"""What the script says of a call, and the parameters that ask for it."""

SCRIPT = [scripted for scripted, _ in KINDS]
"""The script answers in the order of arrival: calls are made one after the other, with these parameters in turn."""
SAMPLINGS = [sampling for _, sampling in KINDS]


async def by_generate() -> list[Generated]:
    """What `Generate` makes of each kind."""
    async with scripted_sidecar(*SCRIPT) as running:
        return [await running.client.generate(sampling=sampling) for sampling in SAMPLINGS]


def check_same(made: Generated, expected: Generated) -> None:
    """Assert that two calls are the same, however their tokens were grouped and whatever their ids are."""
    assert made.finished == expected.finished
    for choice in expected.finished:
        assert made.token_ids(choice) == expected.token_ids(choice) != []
        assert made.logprobs(choice) == expected.logprobs(choice)
        assert made.weight_versions(choice) == expected.weight_versions(choice)
    assert _top_of(made) == _top_of(expected)
    made.started.call_id = expected.started.call_id
    assert made.started == expected.started


def _top_of(generated: Generated) -> list[tuple[int, int, float]]:
    tops = [delta.top_logprobs for delta in generated.deltas]
    return [(top.k, *each) for top in tops for each in zip(top.token_ids, top.logprobs, strict=True)]
