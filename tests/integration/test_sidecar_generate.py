"""GenerationService over a socket: each token once, with its own log-probability, and clear refusals."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from transformers import AutoTokenizer

from support.refusals import refused
from support.scripted import Json, call, scripted_sidecar, tokens
from tokentape.v1 import generation_pb2, types_pb2

Sampling = types_pb2.SamplingParameters

STOP, LENGTH, ABORT = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT

INVALID = grpc.StatusCode.INVALID_ARGUMENT

FOREVER = 60_000

ANSWER = call(tokens(10, 11, finish="stop"))


def near(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("order", [1, -1])
async def test_sampled_token_is_found_by_id_A01(order: int) -> None:
    maps = [dict(list(values.items())[::order]) for values in ({"13": -0.7, "42": -4.2}, {"7": -0.1, "9": -3.0})]
    async with scripted_sidecar(call(tokens(42, 7, finish="stop", logprobs=maps))) as running:
        generated = await running.client.generate()
    assert generated.token_ids() == [42, 7]
    assert generated.logprobs() == near([-4.2, -0.1])


@pytest.mark.parametrize("logprobs", [[{"13": -0.7}], [{"42": "NaN"}], [{"42": "-Infinity"}], []])
async def test_missing_logprob_is_an_error_of_that_call_never_zero_A01(logprobs: list[Json]) -> None:
    async with scripted_sidecar(call(tokens(42, finish="stop", logprobs=logprobs)), ANSWER) as running:
        with refused(grpc.StatusCode.INTERNAL, "log-probabilit"):
            await running.client.generate()
        assert (await running.client.generate()).token_ids() == [10, 11]


@pytest.mark.parametrize(
    ("sampled", "logprobs"),
    [
        (10, {"10": -0.1, "11": -2.0}),
        (99, {"99": -9.0, "10": -0.1, "11": -2.0}),
        (10, {"11": -2.0, "10": -0.1, "12": -7.0}),
    ],
)
async def test_exactly_k_top_logprobs_descending_without_the_sampled_one_twice_A04(
    sampled: int, logprobs: dict[str, float]
) -> None:
    async with scripted_sidecar(call(tokens(sampled, finish="stop", logprobs=[logprobs]))) as running:
        generated = await running.client.generate(sampling=Sampling(top_logprobs=2))
    (delta,) = generated.deltas
    assert (delta.top_logprobs.k, list(delta.top_logprobs.token_ids)) == (2, [10, 11])
    assert list(delta.top_logprobs.logprobs) == near([-0.1, -2.0])
    assert list(delta.logprobs) == near([logprobs[str(sampled)]])


async def test_more_top_logprobs_than_the_engine_grants_are_refused_A04() -> None:
    async with scripted_sidecar(ANSWER, max_logprobs=5) as running:
        with refused(INVALID, r"sampling.top_logprobs: must be at least 0 and at most 5, got 6"):
            await running.client.generate(sampling=Sampling(top_logprobs=6))
        assert (await running.client.generate()).token_ids() == [10, 11]


@pytest.mark.parametrize(
    ("sampling", "token_ids", "reason", "stop_token_id"),
    [
        (Sampling(), [97, 645], STOP, None),
        (Sampling(stop_token_ids=[643]), [97, 645], STOP, None),
        (Sampling(stop_token_ids=[97]), [97], STOP, 97),
        (Sampling(stop_token_ids=[97], min_tokens=2), [97, 645], STOP, None),
        (Sampling(ignore_eos=True, max_tokens=3), [97, 645, 98], LENGTH, None),
    ],
)
async def test_the_stop_token_is_last_with_its_own_logprob_A07(
    sampling: types_pb2.SamplingParameters,
    token_ids: list[int],
    reason: types_pb2.FinishReason,
    stop_token_id: int | None,
) -> None:
    logprobs = [{"97": -0.5}, {"645": -0.25}, {"98": -1.5}, {"99": -2.5}]
    step = tokens(97, 645, 98, 99, finish="length", logprobs=logprobs)
    async with scripted_sidecar(call(step), eos_token_ids=[645]) as running:
        generated = await running.client.generate(sampling=sampling)
    assert generated.token_ids() == token_ids
    assert generated.logprobs() == [-0.5, -0.25, -1.5][: len(token_ids)]
    finished = generated.finished[0]
    assert (finished.finish_reason, finished.token_count) == (reason, len(token_ids))
    expected = None if stop_token_id is None else "stop_token_id"
    assert (finished.WhichOneof("stop_reason"), finished.stop_token_id) == (expected, stop_token_id or 0)


async def test_a_stop_string_is_named_and_its_ids_stay() -> None:
    async with scripted_sidecar(call({"text": "one END two", "finish_reason": "stop"})) as running:
        generated = await running.client.generate(sampling=Sampling(stop=["END"]))
    assert bytes(generated.token_ids()) == b"one END"
    assert generated.finished[0].stop_string == "END"


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([1, 1000], Sampling(), r"prompt_token_ids\[1\]"),
        ([2**32 - 1], Sampling(), r"prompt_token_ids\[0\]"),
        ([1], Sampling(stop_token_ids=[1005]), r"sampling.stop_token_ids\[0\]"),
        ([1], Sampling(logit_bias={1005: 1.0}), r"sampling.logit_bias"),
        ([1], Sampling(allowed_token_ids=[3, 1005]), r"sampling.allowed_token_ids\[1\]"),
    ],
)
async def test_ids_outside_of_the_vocabulary_are_refused_and_the_next_is_served_A10(
    prompt: list[int], sampling: types_pb2.SamplingParameters, field: str
) -> None:
    async with scripted_sidecar(ANSWER) as running:
        with refused(INVALID, rf"^{field}: token id .* is not in the vocabulary of 1000 tokens"):
            await running.client.generate(prompt, sampling)
        assert (await running.client.generate()).token_ids() == [10, 11]


async def test_a_sampled_id_of_the_padding_area_is_recorded_as_it_is_A10() -> None:
    async with scripted_sidecar(call(tokens(1003, finish="stop"))) as running:
        generated = await running.client.generate()
    assert (generated.token_ids(), generated.logprobs()) == ([1003], [-1.0])


@pytest.mark.parametrize(("asked", "granted"), [(1, 1), (4, 4), (5, 4), (10_000, 4), (None, 4)])
async def test_max_tokens_is_clamped_to_the_context_A11(asked: int | None, granted: int) -> None:
    async with scripted_sidecar(call(tokens(*range(10, 30), finish="stop")), max_model_len=64) as running:
        generated = await running.client.generate(range(60), Sampling(max_tokens=asked))
    assert generated.started.max_tokens == granted
    assert generated.token_ids() == list(range(10, 10 + granted))
    assert generated.finish_reason() == LENGTH


async def test_max_tokens_zero_is_refused_A11() -> None:
    async with scripted_sidecar(ANSWER) as running:
        with refused(INVALID, "sampling.max_tokens: must be at least 1, got 0"):
            await running.client.generate(sampling=Sampling(max_tokens=0))


@pytest.mark.parametrize("length", [64, 65, 200])
async def test_a_prompt_that_fills_the_context_is_out_of_range_with_both_numbers_C06_A11(length: int) -> None:
    async with scripted_sidecar(ANSWER, max_model_len=64) as running:
        with refused(
            grpc.StatusCode.OUT_OF_RANGE,
            rf"maximum context length is 64 tokens, but the prompt has {length}",
        ):
            await running.client.generate([1] * length)
        assert (await running.client.generate()).token_ids() == [10, 11]


@pytest.mark.parametrize(
    ("steps", "sampling", "token_ids"),
    [
        ([tokens(10, 11, finish="stop")], Sampling(max_tokens=1), [10]),
        ([tokens(10), tokens(11, 12, finish="stop")], Sampling(), [10, 11, 12]),
        ([tokens(10), tokens(finish="stop")], Sampling(), [10]),
        ([tokens(finish="abort")], Sampling(), []),
        ([tokens(10, finish="stop"), tokens(10, 11, finish="stop")], Sampling(), [10]),
    ],
)
async def test_every_id_comes_once_and_the_finish_once_and_last_A12(
    steps: list[Json], sampling: types_pb2.SamplingParameters, token_ids: list[int]
) -> None:
    async with scripted_sidecar(call(*steps)) as running:
        # read_to_end asserts the order.
        generated = await running.client.generate(sampling=sampling)
    assert generated.token_ids() == token_ids
    assert generated.finished[0].token_count == len(token_ids)


async def test_choices_do_not_mix_A13() -> None:
    steps = [
        tokens(10),
        tokens(20, choice=1),
        tokens(11),
        tokens(21, choice=1, finish="stop"),
        tokens(12, finish="length"),
    ]
    steps = [step | {"delay_ms": 5} for step in steps]
    async with scripted_sidecar(call(*steps)) as running:
        generated = await running.client.generate(sampling=Sampling(n=2))
    assert [generated.token_ids(choice) for choice in range(2)] == [[10, 11, 12], [20, 21]]
    assert [generated.finish_reason(choice) for choice in range(2)] == [LENGTH, STOP]
    assert [generated.finished[choice].token_count for choice in range(2)] == [3, 2]


async def test_n_of_zero_is_refused_A13() -> None:
    async with scripted_sidecar(ANSWER) as running:
        with refused(INVALID, "sampling.n: must be at least 1"):
            await running.client.generate(sampling=Sampling(n=0))


async def test_prompt_logprobs_come_once_with_started_one_less_than_the_prompt_A13() -> None:
    maps = [{"2": -0.5}, {"3": -1.5, "9": -0.25}, {"4": -2.5}, {"5": -3.5}]
    async with scripted_sidecar({"prompt_logprobs": maps, "steps": [tokens(10, finish="stop")]}, ANSWER) as running:
        generated = await running.client.generate([1, 2, 3, 4, 5], Sampling(prompt_logprobs=1))
        without = await running.client.generate()
    assert generated.started.prompt_token_count == 5
    assert list(generated.started.prompt_logprobs) == [-0.5, -1.5, -2.5, -3.5]
    assert list(generated.started.prompt_top_logprobs.token_ids) == [2, 9, 4, 5]
    assert not without.started.prompt_logprobs
    assert not without.started.HasField("prompt_top_logprobs")


async def test_a_delta_never_mixes_weight_versions() -> None:
    steps = [tokens(10, weight_version="1"), tokens(11, 12, weight_version="2"), tokens(13, finish="stop")]
    async with scripted_sidecar(call(*steps)) as running:
        generated = await running.client.generate()
        model = await running.client.generation.GetModel(generation_pb2.GetModelRequest())
    assert generated.token_ids() == [10, 11, 12, 13]
    assert generated.weight_versions() == ["1", "2", "2", "2"]
    assert model.weight_version == "2"


async def test_tokens_arrive_while_the_engine_still_samples() -> None:
    async with scripted_sidecar(call(tokens(10), tokens(11, delay_ms=FOREVER))) as running:
        stream = running.client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1]))
        events = aiter(stream)
        assert (await anext(events)).WhichOneof("event") == "started"
        assert list((await anext(events)).delta.token_ids) == [10]
        stream.cancel()


async def test_a_busy_reader_gets_all_tokens_in_few_messages() -> None:
    """Load coalesces by itself: what was sampled while nobody read comes together."""
    count = 20_000
    async with scripted_sidecar(call(tokens(*[7] * count, finish="stop")), max_model_len=count + 10) as running:
        generated = await running.client.generate()
    assert generated.token_ids() == [7] * count
    assert len(generated.deltas) < 100


async def test_abort_ends_the_stream_with_what_was_sampled() -> None:
    async with scripted_sidecar(call(tokens(10, 11), tokens(12, delay_ms=FOREVER))) as running:
        stream = running.client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1]))
        events = aiter(stream)
        started = (await anext(events)).started
        sampled = list((await anext(events)).delta.token_ids)
        for _ in range(2):
            await running.client.generation.Abort(generation_pb2.AbortRequest(call_id=started.call_id))
        rest = [event async for event in stream]
        assert [event.WhichOneof("event") for event in rest][-1] == "finished"
        sampled += [i for event in rest for i in event.delta.token_ids]
        assert sampled == [10, 11]
        assert rest[-1].finished.finish_reason == ABORT
        assert running.sidecar.running_call_count == 0


async def test_aborting_what_does_not_run_is_no_error_C03() -> None:
    async with scripted_sidecar(ANSWER) as running:
        generated = await running.client.generate()
        for call_id in ("", "call-unknown", generated.started.call_id):
            await running.client.generation.Abort(generation_pb2.AbortRequest(call_id=call_id))


async def test_the_model_is_described() -> None:
    async with scripted_sidecar(
        max_model_len=64, vocab_size=1003, eos_token_ids=[7, 8], max_logprobs=5, name="toy", lora_names=["math"]
    ) as running:
        model = await running.client.generation.GetModel(generation_pb2.GetModelRequest())
    assert model.engine_version
    model.engine_version = ""
    assert model == generation_pb2.GetModelResponse(
        name="toy",
        max_context_tokens=64,
        vocabulary_size=1003,
        eos_token_ids=[7, 8],
        logprobs_mode=generation_pb2.LOGPROBS_MODE_PROCESSED,
        default_sampling=Sampling(),
        engine="scripted",
        sidecar_name="main",
        max_top_logprobs=5,
        lora_names=["math"],
    )


async def test_the_tokenizer_arrives_whole_and_loads(model_directory: Path, tmp_path: Path) -> None:
    async with scripted_sidecar(tokenizer=model_directory) as running:
        pieces = [piece async for piece in running.client.generation.GetTokenizer(generation_pb2.GetTokenizerRequest())]
    archive = b"".join(piece.data for piece in pieces)
    assert pieces[0].size_bytes == len(archive)
    assert pieces[0].sha256 == hashlib.sha256(archive).hexdigest()
    assert not any(piece.sha256 or piece.size_bytes for piece in pieces[1:])
    assert all(len(piece.data) <= 1024 * 1024 for piece in pieces)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        tar.extractall(tmp_path, filter="data")
    assert not (tmp_path / "model.safetensors").exists()
    theirs, ours = (
        cast("Any", AutoTokenizer).from_pretrained(str(directory)) for directory in (model_directory, tmp_path)
    )
    text = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template
