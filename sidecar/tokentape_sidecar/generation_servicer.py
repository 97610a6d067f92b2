"""GenerationService: from request to domain call, from domain call to response."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from tokentape import tracing
from tokentape.logs import bind
from tokentape.v1 import generation_pb2, generation_pb2_grpc
from tokentape_sidecar import convert
from tokentape_sidecar.call_reader import CallReader
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.interceptors import Context
from tokentape_sidecar.many_calls import ManyCalls
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.tape_store import TapeStore

# Small enough for a client with gRPC's default limit of 4 MiB, grpcurl among them.
_ARCHIVE_PIECE_BYTES = 1024 * 1024


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves `tokentape.v1.GenerationService`."""

    def __init__(
        self, *, engine: Engine, calls: Calls, tapes: TapeStore, sidecar_name: str, tokenizer_archive: bytes
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._tapes = tapes
        self._sidecar_name = sidecar_name
        self._archive = tokenizer_archive
        self._archive_sha256 = hashlib.sha256(tokenizer_archive).hexdigest()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream one call's record as it grows."""
        del context
        record = await self._start(request)
        reader = CallReader(record)
        try:
            while not record.started:
                await record.wait_changed()
            yield convert.started_to_proto(record)
            while not reader.at_end:
                events = reader.read_new()
                for event in events:
                    yield convert.event_to_proto(event)
                # While they were sent more may have come, and nobody would wake us for it: look again first.
                if not events:
                    await record.wait_changed()
            if record.error is not None:
                raise record.error
        finally:
            self._calls.abandon(record)

    async def GenerateMany(
        self, request_iterator: AsyncIterable[generation_pb2.GenerateManyRequest], context: Context
    ) -> AsyncIterator[generation_pb2.GenerateManyResponse]:
        """Stream the records of many calls as they grow."""
        del context
        async with aclosing(ManyCalls(self._start, self._calls.abandon).run(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def _start(self, request: generation_pb2.GenerateRequest) -> CallRecord:
        with self._calls.statistics.refusals():
            tape = self._tapes.writable(request.tape_id) if request.tape_id else None
            call = replace(convert.call_request_from_proto(request), trace_headers=tracing.headers_of())
            record = await self._calls.start(call, tape)
        bind(call_id=record.call_id)
        return record

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """End a call at the engine."""
        del context
        await self._calls.abort(request.call_id)
        return generation_pb2.AbortResponse()

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: Context
    ) -> generation_pb2.GetModelResponse:
        """Describe the model."""
        del request, context
        return convert.model_to_proto(
            self._engine.model, weight_version=self._engine.weight_version, sidecar_name=self._sidecar_name
        )

    async def GetTokenizer(
        self, request: generation_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GetTokenizerResponse]:
        """Stream the tokenizer's archive."""
        del request, context
        for start in range(0, len(self._archive), _ARCHIVE_PIECE_BYTES):
            response = generation_pb2.GetTokenizerResponse(data=self._archive[start : start + _ARCHIVE_PIECE_BYTES])
            if start == 0:
                response.sha256 = self._archive_sha256
                response.size_bytes = len(self._archive)
            yield response
