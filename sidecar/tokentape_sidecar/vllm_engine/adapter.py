"""`VllmEngine`: an in-process `AsyncLLM` behind the engine port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import vllm
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tokentape_sidecar.engine import EngineCall, Model, Sink
from tokentape_sidecar.engine_controls import EngineControls
from tokentape_sidecar.errors import EngineBusy, EngineDead, EngineNotLoaded, InvalidArgument
from tokentape_sidecar.vllm_engine import versions
from tokentape_sidecar.vllm_engine.controls import EXTENSION, VllmControls
from tokentape_sidecar.vllm_engine.direct_path import DirectPath
from tokentape_sidecar.vllm_engine.guard import Guard
from tokentape_sidecar.vllm_engine.loras import add_all, check_names, check_slots, lora_defaults, to_requests
from tokentape_sidecar.vllm_engine.parameters import (
    describe,
    engine_arguments,
    sampling_params,
    tokenizer_directory_of,
)
from tokentape_sidecar.vllm_engine.public_path import PublicPath
from tokentape_sidecar.weights import WeightObserver

PathName = Literal["direct", "public"]
"""How calls reach vLLM."""

logger = logging.getLogger(__name__)

_LIVENESS_SECONDS = 0.5


class VllmEngine:
    """Drives an `AsyncLLM`, its own (`load`) or one that was handed in (`attach`)."""

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        tokenizer_directory: Path,
        loras: Sequence[LoRARequest],
        guard: Guard | None,
        path: PathName | None,
    ) -> None:
        """Use `load` or `attach`. `guard` is that of an own engine."""
        self._engine = engine
        self._guard = guard
        self._loras = {lora.lora_name: lora for lora in loras}
        self._model = describe(engine, tokenizer_directory, list(self._loras))
        direct = path == "direct" if path else versions.direct_path_supported()
        if not direct and not path:
            logger.warning(
                "vLLM %s is not one that the direct path was verified with; using its public deltas", vllm.__version__
            )
        self._weights = WeightObserver(engine)
        make_path = DirectPath if direct else PublicPath
        self._path = make_path(engine, self._weights)
        self._controls = VllmControls(engine, self._weights, self._path.drain)

    @classmethod
    async def load(
        cls,
        *,
        model: str,
        served_model_name: str | None,
        logprobs_mode: Literal["processed", "raw"],
        loras: Mapping[str, Path],
        arguments: Sequence[str],
        otlp_traces_endpoint: str | None = None,
    ) -> Self:
        """Load a model into an engine of our own; `arguments` are vLLM's command-line options.

        It sends its traces to `otlp_traces_endpoint`, a URL; `None`: it makes none, unless `arguments` say so.
        `loras` are the adapters that it serves beside the model: directories in PEFT's format, by name.

        Blocks the event loop for as long as vLLM takes to load. Raises `EngineNotLoaded` where it cannot.
        """
        name = served_model_name or model
        check_names(loras, name)
        options = engine_arguments(model, arguments, {"worker_extension_cls": EXTENSION, **lora_defaults(loras)})
        check_slots(options.max_loras, len(loras))
        options.served_model_name = name
        options.logprobs_mode = "processed_logprobs" if logprobs_mode == "processed" else "raw_logprobs"
        if otlp_traces_endpoint is not None:
            _trace(options, otlp_traces_endpoint)
        try:
            # By its use vLLM chooses how much a step computes: on a large GPU four to eight times as much for a server.
            engine = AsyncLLM.from_engine_args(options, usage_context=UsageContext.OPENAI_API_SERVER)
        except Exception as error:
            logger.exception("vLLM could not load %s", model)
            reason = str(error).strip().partition("\n")[0]
            raise EngineNotLoaded(
                f"--model: vLLM could not load {model}: {reason} (the first error in its log above is the cause)"
            ) from error
        adapters = to_requests(loras)
        await add_all(engine, adapters)
        directory = tokenizer_directory_of(engine)
        return cls(engine, tokenizer_directory=directory, loras=adapters, guard=Guard(), path=None)

    @classmethod
    def attach(
        cls,
        engine: AsyncLLM,
        *,
        tokenizer_directory: Path | None = None,
        loras: Sequence[LoRARequest] = (),
        path: PathName | None = None,
    ) -> Self:
        """Drive an engine that somebody else owns; `close` leaves it running.

        `tokenizer_directory` holds the tokenizer's files; absent, they are those of the engine's model. `loras` are the
        adapters that calls may name, with the ids by which the engine has them: vLLM lists ids only. `path` chooses how
        calls reach vLLM; absent, the direct path where the installed version is one it was verified with.
        """
        directory = tokenizer_directory or tokenizer_directory_of(engine)
        config = engine.vllm_config.lora_config
        check_slots(config.max_loras if config else 0, len(loras))
        return cls(engine, tokenizer_directory=directory, loras=loras, guard=None, path=path)

    def freeze_process(self) -> None:
        """Take what loading has left in this process for lasting, which is for one that has no other engine.

        vLLM reads its environment variables no more, of which it looks one up for every token. The garbage collector no
        more looks through all that was made, which would stop everything for a third of a second now and then.
        """
        envs.enable_envs_cache()
        freeze_gc_heap()

    @property
    def model(self) -> Model:
        """What the engine serves."""
        return self._model

    @property
    def weight_version(self) -> str:
        """The version of the weights that would sample the next token."""
        return self._weights.version

    @property
    def held(self) -> bool:
        """Whether it is paused, asleep, or busy with a call to its workers (see `engine.Engine`)."""
        return self._weights.held

    @property
    def controls(self) -> EngineControls:
        """What pauses it, changes its weights and lets it sleep (see `engine.Engine`)."""
        return self._controls

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        """Start a request (see `engine.Engine`)."""
        # As vLLM's renderer would hand it on: nothing is left to be done to it.
        prompt = tokens_input(list(call.prompt_token_ids), cache_salt=call.cache_salt or None)
        try:
            params = sampling_params(call.sampling, self._engine)
            lora = self._loras[call.lora_name] if call.lora_name else None
            if call.trace_headers and not await self._engine.is_tracing_enabled():
                # It would warn of headers that it has no use for.
                call = replace(call, trace_headers={})
            await self._path.submit(call, prompt, params, sink, lora)
        except EngineDeadError:
            raise EngineDead("the engine is dead") from None
        except versions.BUSY as error:
            # vLLM's admission control: its queue is full.
            raise EngineBusy(str(error)) from error
        except versions.REFUSED as error:
            raise InvalidArgument("sampling", str(error)) from error

    async def abort(self, call_id: str) -> None:
        """End a request; what it has sampled is handed over (see `engine.Engine`)."""
        await self._path.abort(call_id)

    async def ping(self) -> None:
        """Ask the core, which answers between two steps (see `engine.Engine`)."""
        await self._engine.is_sleeping()

    async def wait_dead(self) -> None:
        """Return when vLLM says that its core is gone (see `engine.Engine`)."""
        # vLLM offers no event for it.
        while not self._engine.errored:  # noqa: ASYNC110
            await asyncio.sleep(_LIVENESS_SECONDS)

    async def close(self) -> None:
        """Shut an own engine down (see `engine.Engine`)."""
        await self._path.close()
        self._weights.detach()
        if self._guard is not None:
            await asyncio.to_thread(self._engine.shutdown)
            self._guard.close()


def _trace(options: AsyncEngineArgs, endpoint: str) -> None:
    # vLLM makes its spans of what it keeps for its statistics, and dies of the first request without.
    if options.disable_log_stats:
        raise EngineNotLoaded("--otlp-traces-endpoint: vLLM's traces need its statistics; no --disable-log-stats")
    options.otlp_traces_endpoint = endpoint
