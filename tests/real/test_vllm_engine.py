"""The sidecar on a real vLLM engine (CPU, SmolLM2-135M-Instruct in bfloat16), by both ways from the adapter into vLLM.

A recorder below the adapter, at the engine core's client, notes what the engine really emitted.
"""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest
from grpc_health.v1 import health_pb2

from support.real_engine import QUESTIONS, AdapterPath, RealEngine, requests_of, sidecar
from support.refusals import refused
from support.scripted import RunningSidecar
from support.sidecar_client import Generated, sampled_on
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_the_tapes_ids_are_the_engine_cores_for_calls_at_once(engine: RealEngine, path: AdapterPath) -> None:
    async with sidecar(engine, path) as running:
        client = running.client
        tape = await client.open_tape()
        generated = await asyncio.gather(
            *(
                client.generate(engine.prompt(question), Sampling(temperature=1.0, max_tokens=24), tape_id=tape.tape_id)
                for question in QUESTIONS
            )
        )
        await client.seal(tape)
        entries = await client.watch(tape)
    for one in generated:
        (below,) = requests_of(engine.emitted, one.started.call_id).values()
        assert one.token_ids() == below == sampled_on(entries, one.started.call_id)
        assert len(below) == one.finished[0].token_count
        ended_by = types_pb2.FINISH_REASON_STOP if below[-1] == 2 else types_pb2.FINISH_REASON_LENGTH
        assert one.finish_reason() == ended_by
        assert one.logprobs() == [
            value
            for entry in entries
            if entry.tokens_sampled.call_id == one.started.call_id
            for value in entry.tokens_sampled.logprobs
        ]
    assert len({tuple(one.token_ids()) for one in generated}) == len(QUESTIONS)


async def test_two_choices_are_two_requests_each_with_its_own_ids(engine: RealEngine, path: AdapterPath) -> None:
    async with sidecar(engine, path) as running:
        generated = await running.client.generate(
            engine.prompt(QUESTIONS[6]), Sampling(temperature=1.0, n=2, max_tokens=16)
        )
    below = requests_of(engine.emitted, generated.started.call_id)
    assert [generated.token_ids(choice) for choice in range(2)] == [below[key] for key in sorted(below)]
    assert generated.token_ids(0) != generated.token_ids(1)
    assert set(generated.finished) == {0, 1}


async def greedy(engine: RealEngine, running: RunningSidecar, sampling: types_pb2.SamplingParameters) -> Generated:
    sampling.MergeFrom(Sampling(temperature=0.0, max_tokens=24))
    return await running.client.generate(engine.prompt(QUESTIONS[3]), sampling)


async def test_a_stop_string_ends_a_call_and_its_ids_stay(engine: RealEngine, path: AdapterPath) -> None:
    async with sidecar(engine, path) as running:
        whole = await greedy(engine, running, Sampling())
        text = engine.tokenizer.decode(whole.token_ids())
        stop = text[20:24]
        stopped = await greedy(engine, running, Sampling(stop=["never said", stop]))
    assert stopped.finished[0].stop_string == stop
    assert stopped.finish_reason() == types_pb2.FINISH_REASON_STOP
    count = len(stopped.token_ids())
    assert stopped.token_ids() == whole.token_ids()[:count] == only_request(engine, stopped)
    # The token that completed it is the last one.
    assert stop in engine.tokenizer.decode(stopped.token_ids())
    assert stop not in engine.tokenizer.decode(stopped.token_ids()[:-1])


def only_request(engine: RealEngine, generated: Generated) -> list[int]:
    (token_ids,) = requests_of(engine.emitted, generated.started.call_id).values()
    return token_ids


async def test_a_stop_token_is_named_and_kept(engine: RealEngine, path: AdapterPath) -> None:
    async with sidecar(engine, path) as running:
        whole = await greedy(engine, running, Sampling())
        token_id = whole.token_ids()[7]
        first = whole.token_ids().index(token_id)
        stopped = await greedy(engine, running, Sampling(stop_token_ids=[token_id]))
    assert stopped.token_ids() == whole.token_ids()[: first + 1]
    assert stopped.finished[0].stop_token_id == token_id


async def test_abort_in_mid_generation_keeps_what_was_sampled(engine: RealEngine, path: AdapterPath) -> None:
    async with sidecar(engine, path) as running:
        client = running.client
        tape = await client.open_tape()
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=engine.prompt(QUESTIONS[6]),
            sampling=Sampling(temperature=1.0, ignore_eos=True),
            tape_id=tape.tape_id,
        )
        generated = Generated()
        stream = client.generation.Generate(request)
        async for response in stream:
            generated.take(response)
            if len(generated.token_ids()) >= 5 and not generated.finished:
                await client.generation.Abort(generation_pb2.AbortRequest(call_id=generated.started.call_id))
        on_tape = sampled_on(await client.entries(tape), generated.started.call_id)
    assert generated.finish_reason() == types_pb2.FINISH_REASON_ABORT
    assert generated.token_ids() == on_tape
    below = only_request(engine, generated)
    assert len(on_tape) >= 5
    assert on_tape == below[: len(on_tape)]
    # Only the direct path takes what is on its way when the abort comes.
    assert len(below) - len(on_tape) <= (0 if path == "direct" else 1)


async def test_a_client_that_leaves_frees_the_engine_and_its_tokens_are_kept(
    engine: RealEngine, path: AdapterPath
) -> None:
    async with sidecar(engine, path) as running:
        client = running.client
        tape = await client.open_tape()
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=engine.prompt(QUESTIONS[6]),
            sampling=Sampling(temperature=1.0, ignore_eos=True),
            tape_id=tape.tape_id,
        )
        stream = client.generation.Generate(request)
        seen = 0
        async for response in stream:
            seen += len(response.delta.token_ids)
            if seen >= 3:
                break
        assert engine.llm.output_processor.get_num_unfinished_requests() == 1
        stream.cancel()
        await eventually(lambda: not engine.llm.output_processor.get_num_unfinished_requests())
        await eventually(lambda: not running.sidecar.running_call_count)
        entries = await client.entries(tape)
    completion = entries[-1].choice_finished.completion
    assert completion.finish_reason == types_pb2.FINISH_REASON_ABORT
    assert completion.token_count >= 3
    call_id = entries[0].call_started.call_id
    (below,) = requests_of(engine.emitted, call_id).values()
    assert sampled_on(entries, call_id) == below[: completion.token_count]


async def test_a_trainers_pause_is_no_stall_E13(engine: RealEngine) -> None:
    limit_seconds = 2.0
    async with sidecar(engine, stall_limit_seconds=limit_seconds) as running:
        tape = await running.client.open_tape()
        sampling = Sampling(temperature=1.0, max_tokens=200, ignore_eos=True)
        generating = asyncio.create_task(
            running.client.generate(engine.prompt(QUESTIONS[0]), sampling, tape_id=tape.tape_id)
        )
        while not any(entry.HasField("tokens_sampled") for entry in await running.client.entries(tape)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.llm.pause_generation(mode="keep", clear_cache=False)
        paused = len(await running.client.entries(tape))
        await asyncio.sleep(2.5 * limit_seconds)
        assert len(await running.client.entries(tape)) == paused
        assert await running.client.health_of() == health_pb2.HealthCheckResponse.SERVING
        await engine.llm.resume_generation()
        assert len((await generating).token_ids()) == 200


async def test_a_regular_expression_binds_what_is_sampled(engine: RealEngine, path: AdapterPath) -> None:
    output = types_pb2.StructuredOutput(regex="[0-9]{3}-[a-c]{2}")
    async with sidecar(engine, path) as running:
        generated = await running.client.generate(
            engine.prompt(QUESTIONS[0]), Sampling(temperature=1.0, structured_output=output, max_tokens=16)
        )
    text = engine.tokenizer.decode(generated.token_ids(), skip_special_tokens=True)
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", text)
    assert generated.token_ids() == only_request(engine, generated)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(structured_output=types_pb2.StructuredOutput(regex="(")), "regex|structured"),
        (Sampling(structured_output=types_pb2.StructuredOutput(grammar="nonsense ::=")), "grammar|structured"),
        (Sampling(structured_output=types_pb2.StructuredOutput(json_schema='{"type": "nonsense"}')), "schema|grammar"),
        (Sampling(seed=7), r"^sampling\.seed: a seed of its own for a call kills vLLM's CPU engine"),
        (Sampling(top_logprobs=21), r"^sampling\.top_logprobs: must be at least 0 and at most 20"),
        (Sampling(stop_token_ids=[49152]), r"^sampling\.stop_token_ids\[0\]: "),
    ],
    ids=["regex", "grammar", "schema", "seed", "top", "stop token"],
)
async def test_what_the_engine_cannot_do_is_refused_and_the_next_call_is_served(
    engine: RealEngine,
    path: AdapterPath,
    sampling: types_pb2.SamplingParameters,
    message: str,
) -> None:
    async with sidecar(engine, path) as running:
        prompt = engine.prompt(QUESTIONS[0])
        with refused(INVALID, f"(?i){message}"):
            await running.client.generate(prompt, sampling)
        generated = await running.client.generate(prompt, Sampling(max_tokens=2))
        assert generated.token_ids() == only_request(engine, generated)


async def test_an_unknown_lora_is_not_found(engine: RealEngine) -> None:
    async with sidecar(engine) as running:
        request = generation_pb2.GenerateRequest(prompt_token_ids=[1], lora_name="none")
        with refused(grpc.StatusCode.NOT_FOUND, "lora_name: no LoRA adapter 'none'"):
            await running.client.generation.Generate(request).read()


async def test_the_model_is_described_as_vllm_has_it(engine: RealEngine) -> None:
    async with sidecar(engine) as running:
        model = await running.client.generation.GetModel(generation_pb2.GetModelRequest())
    assert (model.engine, model.max_context_tokens, model.vocabulary_size) == ("vllm", 1024, 49152)
    assert list(model.eos_token_ids) == [2]
    assert model.engine_version
