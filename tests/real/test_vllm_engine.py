"""The sidecar on a real vLLM engine (CPU, SmolLM2-135M-Instruct in bfloat16).

A recorder below the adapter, at the engine core's client, notes what the engine really emitted; a forward pass of
transformers over the same tokens says what their log-probabilities are. Both ways from the adapter into vLLM are tried.
"""

from __future__ import annotations

import asyncio
import math
import re
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from support.real_engine import Emitted, load_engine, record_emitted, requests_of, shut_down
from support.refusals import refused
from support.scripted import RunningSidecar, sidecar_on
from support.sidecar_client import Generated, sampled_on
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

Sampling = types_pb2.SamplingParameters
INVALID = grpc.StatusCode.INVALID_ARGUMENT

MEAN_TOLERANCE, LARGEST_TOLERANCE = 0.06, 0.6
"""bfloat16 has 8 bits of mantissa, so logits near 20 are exact to 0.06, and kernels differ in the order of their sums.
Values of neighbouring positions, as after a shift, differ by more than 1 on average. At temperature T both are 1/T as
large."""

QUESTIONS = (
    "What is 2 + 3?",
    "Name a colour.",
    "Say hello in French.",
    "Why is the sky blue?",
    "List three animals.",
    "What is the capital of Italy?",
    "Write a short poem.",
    "Count to five.",
)


class RealEngine:
    """An engine, what its core emitted, and the same model in transformers."""

    def __init__(self, llm: AsyncLLM, model_directory: Path) -> None:
        import torch  # noqa: PLC0415 - seconds
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        self.llm = llm
        self.emitted: Emitted = record_emitted(llm)
        loader: Any = AutoModelForCausalLM
        tokenizers: Any = AutoTokenizer
        self._model = loader.from_pretrained(str(model_directory), dtype=torch.bfloat16)
        self.tokenizer = tokenizers.from_pretrained(str(model_directory))

    def prompt(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def logits(self, token_ids: Sequence[int]) -> Any:
        """The float32 logits that predict each of `token_ids` but the first: one row less than tokens."""
        import torch  # noqa: PLC0415

        with torch.no_grad():
            return self._model(torch.tensor([list(token_ids)])).logits[0, :-1].float()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_directory: Path) -> AsyncGenerator[RealEngine]:
    llm = load_engine(model_directory)
    yield RealEngine(llm, model_directory)
    await shut_down(llm)


@pytest.fixture(params=["direct", "public"])
def path(request: pytest.FixtureRequest) -> Literal["direct", "public"]:
    """How the adapter reaches vLLM."""
    return request.param


@asynccontextmanager
async def sidecar(
    engine: RealEngine,
    path: Literal["direct", "public"] = "direct",
    *,
    stall_limit_seconds: float = DEFAULT_STALL_LIMIT_SECONDS,
) -> AsyncGenerator[RunningSidecar]:
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - imports vLLM

    attached = VllmEngine.attach(engine.llm, path=path)
    async with sidecar_on(attached, stall_limit_seconds=stall_limit_seconds) as running:
        yield running
    assert engine.llm.output_processor.get_num_unfinished_requests() == 0


def differences(expected: Any, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """How far each log-probability lies from its own in `expected`, rows of a log-softmax."""
    return [
        abs(row[token_id].item() - value) for row, token_id, value in zip(expected, token_ids, logprobs, strict=True)
    ]


async def test_the_tapes_ids_are_the_engine_cores_for_calls_at_once(
    engine: RealEngine, path: Literal["direct", "public"]
) -> None:
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


@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, None), (0.7, 20)], ids=["as the model", "temperature 0.7, top 20"]
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    engine: RealEngine, path: Literal["direct", "public"], temperature: float, top_k: int | None
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=1.0, max_tokens=32, ignore_eos=True)
    async with sidecar(engine, path) as running:
        model = await running.client.generation.GetModel(generation_pb2.GetModelRequest())
        assert model.logprobs_mode == generation_pb2.LOGPROBS_MODE_PROCESSED
        prompts = [engine.prompt(question) for question in QUESTIONS[:4]]
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
    assert len(off) == 4 * 32
    assert statistics.mean(off) < MEAN_TOLERANCE / temperature
    assert max(off) < LARGEST_TOLERANCE / temperature
    # What the comparison is worth: values of the next position would not pass.
    assert statistics.mean(shifted) > 5 * MEAN_TOLERANCE / temperature


async def test_two_choices_are_two_requests_each_with_its_own_ids(
    engine: RealEngine, path: Literal["direct", "public"]
) -> None:
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


async def test_a_stop_string_ends_a_call_and_its_ids_stay(
    engine: RealEngine, path: Literal["direct", "public"]
) -> None:
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


async def test_a_stop_token_is_named_and_kept(engine: RealEngine, path: Literal["direct", "public"]) -> None:
    async with sidecar(engine, path) as running:
        whole = await greedy(engine, running, Sampling())
        token_id = whole.token_ids()[7]
        first = whole.token_ids().index(token_id)
        stopped = await greedy(engine, running, Sampling(stop_token_ids=[token_id]))
    assert stopped.token_ids() == whole.token_ids()[: first + 1]
    assert stopped.finished[0].stop_token_id == token_id


async def test_abort_in_mid_generation_keeps_what_was_sampled(
    engine: RealEngine, path: Literal["direct", "public"]
) -> None:
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
    engine: RealEngine, path: Literal["direct", "public"]
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


async def test_prompt_logprobs_are_the_prompt_tokens_own(engine: RealEngine, path: Literal["direct", "public"]) -> None:
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
    engine: RealEngine, path: Literal["direct", "public"]
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


async def test_a_regular_expression_binds_what_is_sampled(
    engine: RealEngine, path: Literal["direct", "public"]
) -> None:
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
    path: Literal["direct", "public"],
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
