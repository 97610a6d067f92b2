"""Clients of gRPC servers."""

from __future__ import annotations

import time
import uuid
from typing import Any

from bench.readings import Load, Readings


class GenerateClient:
    """Our gRPC, all streams of a process over one connection."""

    def __init__(self, load: Load, channel: Any) -> None:
        from tokentape.v1 import generation_pb2_grpc  # noqa: PLC0415 - peers' environments have it not

        self._load = load
        self._generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate

    @staticmethod
    def shared(load: Load) -> Any:
        from tokentape.channel import dial  # noqa: PLC0415

        return dial(load.address)

    async def request(self, prompt: list[int], readings: Readings) -> None:
        from tokentape.v1 import generation_pb2, types_pb2  # noqa: PLC0415

        sampling = types_pb2.SamplingParameters(max_tokens=self._load.new_tokens, ignore_eos=True, temperature=1.0)
        request = generation_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
        arrivals: list[float] = []
        tokens, sent = 0, time.monotonic()
        async for response in self._generate(request):
            delta = response.delta
            if delta.token_ids:
                arrivals.append(time.monotonic())
                tokens += len(delta.logprobs)
        if tokens != self._load.new_tokens:
            raise RuntimeError(f"Generate: {tokens} tokens of {self._load.new_tokens}")
        readings.request(sent, arrivals, tokens)


class GenerateManyClient:
    """Our gRPC, all calls of a process on one stream."""

    def __init__(self, load: Load, calls: Any) -> None:
        self._load = load
        self._calls = calls

    @staticmethod
    def shared(load: Load) -> Any:
        from tokentape.channel import dial  # noqa: PLC0415
        from tokentape.many_calls import ManyCalls  # noqa: PLC0415

        return ManyCalls(dial(load.address))

    async def request(self, prompt: list[int], readings: Readings) -> None:
        from tokentape.v1 import generation_pb2, types_pb2  # noqa: PLC0415

        sampling = types_pb2.SamplingParameters(max_tokens=self._load.new_tokens, ignore_eos=True, temperature=1.0)
        sent = time.monotonic()
        call = self._calls.begin(generation_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling))
        arrivals: list[float] = []
        tokens = 0
        while news := await call.read():
            count = sum(len(run.logprobs) for run in news if hasattr(run, "logprobs"))
            if count:
                arrivals.append(time.monotonic())
                tokens += count
        if tokens != self._load.new_tokens:
            raise RuntimeError(f"GenerateMany: {tokens} tokens of {self._load.new_tokens}")
        readings.request(sent, arrivals, tokens)


class SmgClient:
    """smg-grpc-servicer's gRPC, likewise."""

    streamed = True

    def __init__(self, load: Load, channel: Any) -> None:
        from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc  # noqa: PLC0415 - only in `site`

        self._load = load
        self._messages = vllm_engine_pb2
        self._generate = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate

    @staticmethod
    def shared(load: Load) -> Any:
        from tokentape.channel import dial  # noqa: PLC0415

        return dial(load.address)

    async def request(self, prompt: list[int], readings: Readings) -> None:
        of = self._messages
        sampling = of.SamplingParams(
            max_tokens=self._load.new_tokens, ignore_eos=True, temperature=1.0, top_p=1.0, logprobs=0, n=1
        )
        request = of.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized=of.TokenizedInput(input_ids=prompt),
            sampling_params=sampling,
            stream=self.streamed,
        )
        arrivals: list[float] = []
        tokens, sent = 0, time.monotonic()
        async for response in self._generate(request):
            part = response.chunk if self.streamed else response.complete
            # Streamed, the last message repeats the last of the others.
            if part.output_logprobs.token_logprobs:
                arrivals.append(time.monotonic())
                tokens += len(part.output_logprobs.token_logprobs)
        if tokens != self._load.new_tokens:
            raise RuntimeError(f"smg's Generate: {tokens} tokens of {self._load.new_tokens}")
        readings.request(sent, arrivals, tokens)


class WholeSmg(SmgClient):
    streamed = False
