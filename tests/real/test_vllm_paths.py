"""Both ways from the adapter into vLLM, with the same requests, and the weights that tokens carry on each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.real_engine import AdapterPath, RealEngine, requests_of, sidecar
from support.scripted import sidecar_on
from support.sidecar_client import Generated
from support.waiting import eventually
from tokentape.v1 import types_pb2
from tokentape_sidecar.engine_controls import PauseMode

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 2, 198, 1, 4093, 198, 1780, 359, 346, 2, 198]

REQUESTS = {
    "greedy": Sampling(temperature=0.0, max_tokens=16),
    "top log-probabilities": Sampling(temperature=0.0, max_tokens=8, top_logprobs=3),
    "prompt log-probabilities": Sampling(temperature=0.0, max_tokens=2, prompt_logprobs=2),
    "stop string": Sampling(temperature=0.0, max_tokens=64, stop=["."]),
    "stop token": Sampling(temperature=0.0, max_tokens=64, stop_token_ids=[28, 30]),
    "constrained": Sampling(
        temperature=0.0, max_tokens=64, structured_output=types_pb2.StructuredOutput(regex='\\{"a": [0-9]{3}\\}')
    ),
    "biased": Sampling(temperature=0.0, max_tokens=4, logit_bias={260: 50.0}, bad_words=["the"]),
}
"""Greedy, so that what is sampled is what the model says and not chance."""
BOTH: tuple[AdapterPath, ...] = ("direct", "public")


def facts(generated: Generated) -> dict[str, object]:
    """All that a call gave, but for its name and how its tokens were grouped."""
    started = generated.started
    tops = [delta.top_logprobs for delta in generated.deltas if delta.HasField("top_logprobs")]
    return {
        "prompt": (started.prompt_token_count, started.max_tokens, list(started.prompt_logprobs)),
        "prompt tops": (list(started.prompt_top_logprobs.token_ids), list(started.prompt_top_logprobs.logprobs)),
        "ids": [generated.token_ids(choice) for choice in sorted(generated.finished)],
        "logprobs": [generated.logprobs(choice) for choice in sorted(generated.finished)],
        "tops": [
            (token_id, value) for top in tops for token_id, value in zip(top.token_ids, top.logprobs, strict=True)
        ],
        "finished": [generated.finished[choice].SerializeToString() for choice in sorted(generated.finished)],
    }


@pytest.mark.parametrize("name", REQUESTS)
async def test_both_paths_give_the_same(engine: RealEngine, name: str) -> None:
    given: dict[str, dict[str, object]] = {}
    for path in BOTH:
        # What the other path left in the prefix cache would change the sums, if not the choice, of the last bits.
        await engine.llm.reset_prefix_cache()
        async with sidecar(engine, path) as running:
            given[path] = facts(await running.client.generate(PROMPT, REQUESTS[name]))
    assert given["direct"] == given["public"]
    assert given["direct"]["ids"]


async def test_both_paths_give_the_same_choices(engine: RealEngine) -> None:
    """Which steps two choices share is chance, and with it the last bits of their sums: the ids are compared."""
    given: dict[str, list[list[int]]] = {}
    for path in BOTH:
        await engine.llm.reset_prefix_cache()
        async with sidecar(engine, path) as running:
            generated = await running.client.generate(PROMPT, Sampling(temperature=1.0, top_k=1, max_tokens=4, n=2))
        given[path] = [generated.token_ids(choice) for choice in range(2)]
    assert given["direct"] == given["public"]


async def test_each_token_carries_the_weights_that_sampled_it(
    engine: RealEngine, path: AdapterPath, model_directory: Path
) -> None:
    """As OpenRLHF changes weights: a pause that keeps the requests, a worker call, a cache reset, and on."""
    emitted = engine.emitted
    sampling = Sampling(temperature=1.0, max_tokens=48, ignore_eos=True)
    async with sidecar(engine, path) as running:
        before = set(emitted)
        calls = [asyncio.create_task(running.client.generate(PROMPT, sampling)) for _ in range(4)]
        await eventually(lambda: sum(bool(emitted[request]) for request in set(emitted) - before) == 4, 30)
        await engine.llm.pause_generation(mode="keep")
        old = {request: len(emitted[request]) for request in set(emitted) - before}
        await engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_directory)})
        await engine.llm.reset_prefix_cache()
        await engine.llm.resume_generation()
        generated = await asyncio.gather(*calls)
        later = await running.client.generate(PROMPT, Sampling(max_tokens=2))
    for one in generated:
        ((request, _),) = requests_of(emitted, one.started.call_id).items()
        assert 0 < old[request] < 48
        assert one.weight_versions() == [""] * old[request] + ["1"] * (48 - old[request])
    assert later.weight_versions() == ["1", "1"]


async def test_a_version_that_somebody_names_is_the_tokens_own(engine: RealEngine) -> None:
    emitted = engine.emitted
    sampling = Sampling(temperature=1.0, max_tokens=48, ignore_eos=True)
    async with sidecar(engine, "direct") as running:
        call = asyncio.create_task(running.client.generate(PROMPT, sampling))
        before = set(emitted)
        await eventually(lambda: len(set(emitted) - before) == 1, 30)
        await engine.llm.update_weight_version("v2")
        versions = (await call).weight_versions()
        await engine.llm.update_weight_version("default")
    assert versions[0] == ""
    assert versions[-1] == "v2"
    assert versions == sorted(versions)


@pytest.mark.parametrize(
    ("mode", "ends"),
    [(PauseMode.ABORT, types_pb2.FINISH_REASON_ABORT), (PauseMode.WAIT, types_pb2.FINISH_REASON_LENGTH)],
)
async def test_a_call_that_comes_in_a_pause_waits_for_its_end(
    engine: RealEngine, path: AdapterPath, mode: PauseMode, ends: types_pb2.FinishReason
) -> None:
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - imports vLLM

    attached, before = VllmEngine.attach(engine.llm, path=path), len(engine.emitted)
    async with sidecar_on(attached) as running, asyncio.timeout(120):
        client = running.client
        call = asyncio.create_task(client.generate(PROMPT, Sampling(max_tokens=48, ignore_eos=True)))
        await eventually(lambda: len(engine.emitted) > before, 30)
        pausing = asyncio.create_task(attached.controls.pause(mode, clear_cache=True))
        late = asyncio.create_task(client.generate(PROMPT, Sampling(max_tokens=4, ignore_eos=True)))
        await pausing
        assert (await call).finish_reason() == ends
        await asyncio.sleep(0.3)
        assert not late.done()
        assert len(engine.emitted) == before + 1
        await attached.controls.resume()
        assert len((await late).token_ids()) == 4
