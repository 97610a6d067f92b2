"""One sidecar, as the bridge sees it: what it serves, whether it serves, and calls to it.

`run` follows the sidecar's health for as long as the bridge lives. Whatever was learnt of a sidecar is forgotten when
the connection ends, since another model may come back at that address; only a tokenizer of the same SHA-256 is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tokentape.access import OPEN, Access
from tokentape.channel import dial
from tokentape.many_calls import ManyCalls
from tokentape.v1.generation_pb2 import GenerateRequest, GetModelRequest, GetModelResponse
from tokentape.v1.generation_pb2_grpc import GenerationServiceStub
from tokentape.v1.tape_pb2 import FindCallsRequest, FindCallsResponse
from tokentape.v1.tape_pb2_grpc import TapeServiceStub
from tokentape_bridge import metrics
from tokentape_bridge.account import CallMeter
from tokentape_bridge.archive import ArchiveError
from tokentape_bridge.chat_model import ChatModel
from tokentape_bridge.completion import CallEvent
from tokentape_bridge.deadline import seconds_left, statuses_translated
from tokentape_bridge.errors import ApiError, not_let_in
from tokentape_bridge.families import Family, FamilyError
from tokentape_bridge.parents import FindCalls
from tokentape_bridge.settings import ChatSettings
from tokentape_bridge.tokenizer import Tokenizer, TokenizerError
from tokentape_bridge.tokenizer_loading import load_tokenizer
from tokentape_bridge.tracing import call_span

_logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECONDS = 0.8
"""How long a health check may take. A sidecar that does not answer by then is what it last said that it is."""

_MODEL_TIMEOUT_SECONDS = 10
_RETRY_SECONDS = 0.3
_MOST_RETRY_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Served:
    """What a sidecar serves, as of one connection."""

    model: GetModelResponse
    chat: ChatModel

    @property
    def names(self) -> list[str]:
        """What a request's `model` may be: the model's name, or that of a LoRA adapter."""
        return [self.model.name, *self.model.lora_names]

    def has(self, model: str | None) -> bool:
        """Whether a request's `model` is served; `None` is any."""
        return model is None or model in self.names

    def lora_name(self, model: str | None) -> str:
        """Return the adapter that a request's `model`, which is served, names; empty: none."""
        return "" if model is None or model == self.model.name else model


class Sidecar:
    """A sidecar's client. Made on the event loop that uses it; `run` it, and `close` it in the end."""

    def __init__(self, name: str, address: str, settings: ChatSettings, access: Access = OPEN) -> None:
        """`name` is the part of its tape ids before the dot, `address` its gRPC address, which `access` suits.

        Raises `UnusableAccess`.
        """
        self._settings = settings
        self.name = name
        self.address = address
        self.in_flight = 0
        """Requests being served by it."""
        self.serves = False
        """Whether it serves, by its own word; other calls than its health checks may be answered all the same."""
        self.served_now: Served | None = None
        """What it serves; None while that is not known yet."""
        self._problem = ""
        """Why it cannot be used although it serves; empty: it can, or does not serve."""
        self._refuses = False
        """Whether it serves, but does not let this bridge in."""
        self._channel = dial(address, access)
        self._generation = GenerationServiceStub(self._channel)
        self._calls = ManyCalls(self._channel)
        self._tapes = TapeServiceStub(self._channel)
        # grpc_health's own stub has no types.
        formats = HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        self._check_health = self._channel.unary_unary("/grpc.health.v1.Health/Check", *formats)
        self._watch_health = self._channel.unary_stream("/grpc.health.v1.Health/Watch", *formats)
        self._loading = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None

    async def close(self) -> None:
        """Close the connection; calls on it end."""
        await self._calls.close()
        await self._channel.close()

    async def run(self) -> None:
        """Follow the sidecar's health until cancelled, and learn what it serves as soon as it does."""
        delay = _RETRY_SECONDS
        while True:
            try:
                async for update in self._watch_health(HealthCheckRequest(), wait_for_ready=True):
                    await self._follow(update.status)
                    delay = _RETRY_SECONDS
            except grpc.aio.AioRpcError as error:
                self._problem = ""
                self._refuses = error.code() is grpc.StatusCode.UNAUTHENTICATED
                delay = min(2 * delay, _MOST_RETRY_SECONDS) if self._refuses else _RETRY_SECONDS
                what = "does not let this bridge in" if self._refuses else "is gone"
                _logger.warning("sidecar %s at %s %s: %s", self.name, self.address, what, error.details())
            except Exception as error:
                delay = min(2 * delay, _MOST_RETRY_SECONDS)
                # Its traceback comes once.
                is_new = self._problem != str(error)
                self._problem = str(error)
                _logger.error("sidecar %s at %s cannot be used", self.name, self.address, exc_info=is_new)
            await self._forget()
            await asyncio.sleep(delay)

    async def _follow(self, status: HealthCheckResponse.ServingStatus.ValueType) -> None:
        if status == HealthCheckResponse.SERVING:
            self.serves = True
            await self.served()
            metrics.SIDECAR_SERVES.labels(self.name).set(1)
            self._problem, self._refuses = "", False
            _logger.info("sidecar %s at %s serves", self.name, self.address)
        else:
            await self._forget()
            _logger.warning("sidecar %s at %s does not serve", self.name, self.address)

    async def health(self) -> str | None:
        """Return None when the sidecar serves right now and its tokenizer is loaded, else why not."""
        try:
            answer = await self._check_health(HealthCheckRequest(), timeout=HEALTH_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            # One that has many calls to begin answers late, and is not gone: keepalive ends the connection of one that
            # is.
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or not self.serves:
                return f"{error.code().name}: {error.details()}"
        else:
            if answer.status != HealthCheckResponse.SERVING:
                return HealthCheckResponse.ServingStatus.Name(answer.status)
        if self.serves and self.served_now is not None:
            own_name = self.served_now.model.sidecar_name
            return None if own_name == self.name else f"is named {own_name!r}, not {self.name!r}: it has no such tapes"
        if self._refuses:
            return "does not let this bridge in (--sidecar-token-file)"
        return self._problem or "its tokenizer is being loaded"

    async def served(self) -> Served:
        """Return what the sidecar serves, asking it if need be.

        Raises `ApiError` at once while it does not serve or cannot be used, `AioRpcError` while it cannot say.
        """
        async with self._loading:
            if not self.serves and self._refuses:
                raise not_let_in()
            if not self.serves:
                raise _unusable(self._problem) if self._problem else _not_serving(self.name)
            if self.served_now is None:
                model = await self._generation.GetModel(GetModelRequest(), timeout=_MODEL_TIMEOUT_SECONDS)
                self._tokenizer = await self._load_tokenizer()
                self.served_now = Served(model, await asyncio.to_thread(self._chat_model, model, self._tokenizer))
                if model.sidecar_name != self.name:
                    _logger.error(
                        "the sidecar at %s is named %r, not %r: its tapes will not be found",
                        self.address,
                        model.sidecar_name,
                        self.name,
                    )
            return self.served_now

    @contextlib.contextmanager
    def occupied(self) -> Generator[None]:
        """Count one request as being served by this sidecar."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def generate(self, request: GenerateRequest, *, at_end: bool = False) -> AsyncGenerator[CallEvent]:
        """Yield the events of one call. Closing the iterator, or cancelling, aborts the call at the engine.

        `at_end`: none of them before the call has ended, which takes less than following it.
        """
        model = "" if self.served_now is None else self.served_now.model.name
        with (
            statuses_translated(),
            call_span("tokentape.v1.GenerationService/GenerateMany", self.name) as metadata,
            CallMeter(self.name, model, request) as meter,
        ):
            call = self._calls.begin(request, timeout=seconds_left(), metadata=metadata)
            try:
                if at_end:
                    # Not `whole`: what a call that fails had sampled counts.
                    await call.until_end()
                started = await call.accepted()
                meter.count_started(started)
                yield started
                while news := await call.read():
                    meter.count(news, call)
                    for new in news:
                        yield new
            finally:
                call.leave()

    @property
    def find_calls(self) -> FindCalls | None:
        """How calls that may be continued are found; None where continuation is off."""
        return self._find_calls if self._settings.continues else None

    async def _find_calls(self, request: FindCallsRequest) -> FindCallsResponse:
        with statuses_translated(), call_span("tokentape.v1.TapeService/FindCalls", self.name) as metadata:
            return await self._tapes.FindCalls(request, timeout=seconds_left(), metadata=metadata)

    def _chat_model(self, model: GetModelResponse, tokenizer: Tokenizer) -> ChatModel:
        name = self._settings.renderer
        try:
            family = Family.load(name, tokenizer.transformers_tokenizer) if name else None
        except FamilyError as error:
            raise _unusable(str(error)) from error
        return ChatModel(
            tokenizer,
            stop_token_ids=model.eos_token_ids,
            family=family,
            reads_reasoning=self._settings.reads_reasoning,
        )

    async def _forget(self) -> None:
        self.serves = False
        metrics.SIDECAR_SERVES.labels(self.name).set(0)
        # The lock lets a load in progress end first, so that it cannot bring back what is forgotten here.
        async with self._loading:
            self.served_now = None

    async def _load_tokenizer(self) -> Tokenizer:
        try:
            return await load_tokenizer(self._generation, self._tokenizer)
        except (ArchiveError, TokenizerError) as error:
            raise _unusable(str(error)) from error


def _unusable(problem: str) -> ApiError:
    return ApiError(problem, code="tokenizer_unusable", status=500, error_type="server_error")


def _not_serving(name: str) -> ApiError:
    return ApiError(
        f"the sidecar {name} does not serve",
        code="sidecar_unavailable",
        status=503,
        error_type="service_unavailable",
    )
