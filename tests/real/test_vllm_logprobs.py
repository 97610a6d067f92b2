"""The log-probabilities of a real vLLM engine (CPU, SmolLM2-135M-Instruct in bfloat16), by both ways into vLLM.

A forward pass of transformers over the same tokens says what they are.
"""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest

from support.real_engine import QUESTIONS, AdapterPath, RealEngine, differences, sidecar
from support.sidecar_client import Generated
from tokentape.v1 import generation_pb2, types_pb2

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters

MEAN_TOLERANCE, LARGEST_TOLERANCE = 0.06, 0.6
"""bfloat16 has 8 bits of mantissa, so logits near 20 are exact to 0.06, and kernels differ in the order of their sums.
Values of neighbouring positions, as after a shift, differ by more than 1 on average. At temperature T both are 1/T as
large."""


@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, None), (0.7, 20)], ids=["as the model", "temperature 0.7, top 20"]
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    engine: RealEngine, path: AdapterPath, temperature: float, top_k: int | None
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=1.0, max_tokens=64, ignore_eos=True)
    async with sidecar(engine, path) as running:
        model = await running.client.generation.GetModel(generation_pb2.GetModelRequest())
        assert model.logprobs_mode == generation_pb2.LOGPROBS_MODE_PROCESSED
        prompts = [engine.prompt(question) for question in QUESTIONS[:8]]
        generated = await asyncio.gather(*(running.client.generate(prompt, sampling) for prompt in prompts))
    off: list[float] = []
    shifted: list[float] = []
    for prompt, one in zip(prompts, generated, strict=True):
        token_ids, logprobs = one.token_ids(), one.logprobs()
        logits = engine.logits(prompt + token_ids)[len(prompt) - 1 :] / temperature
        for row, token_id in zip(logits, token_ids, strict=True):
            # Noise may have put another token at the edge of the k best.
            if top_k is not None:
                least = min(row.topk(top_k).values[-1].item(), row[token_id].item())
                row[row < least] = -math.inf
        expected = logits.log_softmax(-1)
        off += differences(expected, token_ids, logprobs)
        shifted += differences(logits.log_softmax(-1)[:-1], token_ids[:-1], logprobs[1:])
    assert len(off) == 8 * 64
    assert statistics.mean(off) < MEAN_TOLERANCE / temperature
    assert max(off) < LARGEST_TOLERANCE / temperature
    # What the comparison is worth: values of the next position would not pass.
    assert statistics.mean(shifted) > 5 * MEAN_TOLERANCE / temperature


async def test_prompt_logprobs_are_the_prompt_tokens_own(engine: RealEngine, path: AdapterPath) -> None:
    prompt = engine.prompt(QUESTIONS[0])
    async with sidecar(engine, path) as running:
        generated = await running.client.generate(prompt, Sampling(prompt_logprobs=2, max_tokens=2))
    started = generated.started
    assert len(started.prompt_logprobs) == len(prompt) - 1
    expected = engine.logits(prompt).log_softmax(-1)
    off = differences(expected, prompt[1:], started.prompt_logprobs)
    # Unlikely tokens are further off: their logits are small beside the largest ones.
    assert statistics.mean(off) < 0.15
    top = started.prompt_top_logprobs
    assert (top.k, len(top.token_ids), len(top.logprobs)) == (2, 2 * len(off), 2 * len(off))
    best = expected.max(-1).values.tolist()
    assert statistics.mean(abs(a - b) for a, b in zip(best, top.logprobs[::2], strict=True)) < MEAN_TOLERANCE


async def test_top_logprobs_are_the_k_best_with_the_sampled_one_only_in_its_place(
    engine: RealEngine, path: AdapterPath
) -> None:
    k, prompt = 3, engine.prompt(QUESTIONS[6])
    async with sidecar(engine, path) as running:
        # A second call of the same steps asks for more, which must not widen the first one's rows.
        generated, other = await asyncio.gather(
            running.client.generate(prompt, Sampling(temperature=1.5, top_logprobs=k, max_tokens=16, ignore_eos=True)),
            running.client.generate(prompt, Sampling(temperature=1.5, top_logprobs=7, max_tokens=16, ignore_eos=True)),
        )
    columns(other, 7)
    outside = 0
    for token_id, logprob, best in columns(generated, k):
        if token_id in best:
            assert best[token_id] == logprob
        else:
            outside += 1
            assert logprob <= min(best.values())
    assert outside


def columns(generated: Generated, k: int) -> list[tuple[int, float, dict[int, float]]]:
    """Each sampled token, its log-probability and the k best, which are checked to be k, unique and descending."""
    rows: list[tuple[int, float, dict[int, float]]] = []
    for delta in generated.deltas:
        top = delta.top_logprobs
        assert (top.k, len(top.token_ids)) == (k, k * len(delta.token_ids))
        for i, (token_id, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
            values = list(top.logprobs[i * k : (i + 1) * k])
            best = dict(zip(top.token_ids[i * k : (i + 1) * k], values, strict=True))
            assert len(best) == k
            assert values == sorted(values, reverse=True)
            rows.append((token_id, logprob, best))
    return rows


async def test_a_conversation_that_continues_ids_is_what_the_engine_is_given(engine: RealEngine) -> None:
    """The prompt of a child goes to vLLM as the parent's own ids, never by way of text."""
    async with sidecar(engine) as running:
        client = running.client
        tape = await client.open_tape()
        first = await client.generate(
            engine.prompt(QUESTIONS[0]), Sampling(temperature=1.0, max_tokens=12), tape_id=tape.tape_id
        )
        suffix = engine.tokenizer.encode("\n<|im_start|>user\nAnd 4 + 4?<|im_end|>\n<|im_start|>assistant\n")
        parent = types_pb2.CallReference(call_id=first.started.call_id)
        second = await client.generate(
            suffix, Sampling(prompt_logprobs=0, max_tokens=8), tape_id=tape.tape_id, parent=parent
        )
    whole = engine.prompt(QUESTIONS[0]) + first.token_ids() + suffix
    assert second.started.prompt_token_count == len(whole)
    off = differences(engine.logits(whole).log_softmax(-1), whole[1:], second.started.prompt_logprobs)
    assert statistics.mean(off) < 0.15
