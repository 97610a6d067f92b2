"""Clients of gRPC servers."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from bench.readings import Load, Readings

from tokentape.channel import dial
from tokentape.choice_columns import TokenRun
from tokentape.many_calls import ManyCalls
from tokentape.v1 import generation_pb2, generation_pb2_grpc, types_pb2


class GrpcClient(ABC):
    """A method that answers with a stream, all streams of a process over one connection."""

    name = "Generate"

    def __init__(self, load: Load, shared: Any) -> None:
        self.load = load
        self._method = self.method(shared)

    @staticmethod
    def shared(load: Load) -> Any:
        return dial(load.address)

    @abstractmethod
    def method(self, channel: Any) -> Any:
        """Return what takes a request and returns its responses."""

    @abstractmethod
    def ask(self, prompt: list[int]) -> Any:
        """Return the request."""

    @abstractmethod
    def count(self, response: Any) -> int:
        """Return how many tokens a response has log-probabilities for."""

    async def request(self, prompt: list[int], readings: Readings) -> None:
        request = self.ask(prompt)
        arrivals: list[float] = []
        tokens, sent = 0, time.monotonic()
        async for response in self._method(request):
            if counted := self.count(response):
                arrivals.append(time.monotonic())
                tokens += counted
        readings.request(self.name, sent, arrivals, tokens, self.load.new_tokens)


class GenerateClient(GrpcClient):
    """Our gRPC, a call a stream."""

    def method(self, channel: Any) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(channel).Generate

    def ask(self, prompt: list[int]) -> generation_pb2.GenerateRequest:
        return call_of(prompt, self.load.new_tokens)

    def count(self, response: generation_pb2.GenerateResponse) -> int:
        return len(response.delta.logprobs)


class GenerateManyClient:
    """Our gRPC, all calls of a process on one stream."""

    def __init__(self, load: Load, shared: Any) -> None:
        self._load = load
        self._calls: ManyCalls = shared

    @staticmethod
    def shared(load: Load) -> Any:
        return ManyCalls(dial(load.address))

    async def request(self, prompt: list[int], readings: Readings) -> None:
        request = call_of(prompt, self._load.new_tokens)
        arrivals: list[float] = []
        tokens, sent = 0, time.monotonic()
        call = self._calls.begin(request)
        while news := await call.read():
            count = sum(len(run.logprobs) for run in news if isinstance(run, TokenRun))
            if count:
                arrivals.append(time.monotonic())
                tokens += count
        readings.request("GenerateMany", sent, arrivals, tokens, self._load.new_tokens)


def call_of(prompt: list[int], new_tokens: int) -> generation_pb2.GenerateRequest:
    """Return a call of our gRPC."""
    sampling = types_pb2.SamplingParameters(max_tokens=new_tokens, ignore_eos=True, temperature=1.0)
    return generation_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)


class SmgClient(GrpcClient):
    """smg-grpc-servicer's gRPC."""

    name = "smg's Generate"
    streamed = True

    def __init__(self, load: Load, shared: Any) -> None:
        super().__init__(load, shared)
        self._of = _smg("vllm_engine_pb2")

    def method(self, channel: Any) -> Any:
        return _smg("vllm_engine_pb2_grpc").VllmEngineStub(channel).Generate

    def ask(self, prompt: list[int]) -> Any:
        sampling = self._of.SamplingParams(
            max_tokens=self.load.new_tokens, ignore_eos=True, temperature=1.0, top_p=1.0, logprobs=0, n=1
        )
        return self._of.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized=self._of.TokenizedInput(input_ids=prompt),
            sampling_params=sampling,
            stream=self.streamed,
        )

    def count(self, response: Any) -> int:
        # Streamed, the last message repeats the last of the others.
        part = response.chunk if self.streamed else response.complete
        return len(part.output_logprobs.token_logprobs)


class WholeSmg(SmgClient):
    streamed = False


def _smg(name: str) -> Any:
    # Only in the `site` of a load.
    return import_module(f"smg_grpc_proto.generated.{name}")
