"""The vLLM adapter, and the only module that imports vllm.

It drives an in-process `AsyncLLM`, its own (`VllmEngine.load`) or one that was handed in (`VllmEngine.attach`). A call
is one request at the engine; one task per call moves its deltas to the record.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, cast

import huggingface_hub
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from tokentape_sidecar.engine import (
    EngineCall,
    FinishReason,
    LogprobsMode,
    Model,
    Sampling,
    Sink,
    StructuredOutput,
    TopLogprobs,
)
from tokentape_sidecar.errors import CallError, EngineDead, EngineNotLoaded, InvalidArgument, NotFound
from tokentape_sidecar.tokenizer_archive import TOKENIZER_FILES

logger = logging.getLogger(__name__)

_LIVENESS_SECONDS = 0.5


class VllmEngine:
    """An `AsyncLLM` behind the engine port."""

    def __init__(self, engine: AsyncLLM, *, tokenizer_directory: Path, owned: bool) -> None:
        """Use `load` or `attach`."""
        self._engine = engine
        self._owned = owned
        self._model = _describe(engine, tokenizer_directory)
        self._pumps: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def load(
        cls,
        *,
        model: str,
        served_model_name: str | None,
        logprobs_mode: Literal["processed", "raw"],
        arguments: Sequence[str],
    ) -> Self:
        """Load a model into an engine of our own; `arguments` are vLLM's command-line options.

        Blocks the event loop for as long as vLLM takes to load. Raises `EngineNotLoaded` where it cannot.
        """
        options = _engine_arguments(model, arguments)
        options.served_model_name = served_model_name or model
        options.logprobs_mode = "processed_logprobs" if logprobs_mode == "processed" else "raw_logprobs"
        try:
            engine = AsyncLLM.from_engine_args(options)
        except Exception as error:
            logger.exception("vLLM could not load %s", model)
            reason = str(error).strip().partition("\n")[0]
            raise EngineNotLoaded(f"--model: vLLM could not load {model}: {reason}") from error
        return cls(engine, tokenizer_directory=_tokenizer_directory(engine), owned=True)

    @classmethod
    def attach(cls, engine: AsyncLLM, *, tokenizer_directory: Path | None = None) -> Self:
        """Drive an engine that somebody else owns; `close` leaves it running.

        `tokenizer_directory` holds the tokenizer's files; absent, they are those of the engine's model.
        """
        return cls(engine, tokenizer_directory=tokenizer_directory or _tokenizer_directory(engine), owned=False)

    @property
    def model(self) -> Model:
        """What the engine serves."""
        return self._model

    @property
    def weight_version(self) -> str:
        """Always empty: the public path learns a version only with a finished output."""
        return ""

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        """Start a request (see `engine.Engine`)."""
        if call.lora_name:
            raise NotFound(f"lora_name: no LoRA adapter {call.lora_name!r} is loaded")
        prompt = TokensPrompt(prompt_token_ids=list(call.prompt_token_ids))
        if call.cache_salt:
            prompt["cache_salt"] = call.cache_salt
        try:
            collector = await self._engine.add_request(
                call.call_id, prompt, self._sampling_params(call.sampling), priority=call.priority
            )
        except EngineDeadError:
            raise EngineDead("the engine is dead") from None
        except ValueError as error:
            raise InvalidArgument("sampling", str(error)) from error
        pump = asyncio.create_task(_pump(collector, sink, call))
        self._pumps[call.call_id] = pump
        pump.add_done_callback(lambda _: self._pumps.pop(call.call_id, None))

    async def abort(self, call_id: str) -> None:
        """End a request by vLLM's own abort, which hands over what it has sampled (see `engine.Engine`)."""
        await self._engine.abort(call_id)

    async def wait_dead(self) -> None:
        """Return when vLLM says that its core is gone (see `engine.Engine`)."""
        # vLLM offers no event for it.
        while not self._engine.errored:  # noqa: ASYNC110
            await asyncio.sleep(_LIVENESS_SECONDS)

    async def close(self) -> None:
        """Abort our calls, and shut an own engine down (see `engine.Engine`)."""
        pumps = dict(self._pumps)
        if pumps and not self._engine.errored:
            await self._engine.abort(list(pumps))
        await asyncio.gather(*pumps.values(), return_exceptions=True)
        if self._owned:
            await asyncio.to_thread(self._engine.shutdown)

    def _sampling_params(self, sampling: Sampling) -> SamplingParams:
        chunked = self._engine.vllm_config.scheduler_config.enable_chunked_prefill
        if sampling.seed is not None and current_platform.is_cpu() and chunked:
            raise InvalidArgument(
                "sampling.seed",
                "a seed of its own for a call kills vLLM's CPU engine when prefill is chunked; start it with "
                "--no-enable-chunked-prefill",
            )
        given = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "max_tokens",
                "min_tokens",
                "n",
                "seed",
                "ignore_eos",
                "prompt_logprobs",
            )
            if (value := getattr(sampling, name)) is not None
        }
        return SamplingParams(
            **given,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            logit_bias=dict(sampling.logit_bias) or None,
            bad_words=list(sampling.bad_words) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            structured_outputs=_structured_outputs(sampling.structured_output),
            logprobs=sampling.top_logprobs or 0,
            flat_logprobs=True,
            # Text is made only where the engine must find stop strings in it.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.DELTA,
        )


def _engine_arguments(model: str, arguments: Sequence[str]) -> AsyncEngineArgs:
    # vLLM would take such a name for a repository of a model hub and look for it there.
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise EngineNotLoaded(f"--model: there is no directory {model}")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="tokentape-sidecar … --"))
    options = AsyncEngineArgs.from_cli_args(cast("argparse.Namespace", parser.parse_args(list(arguments))))
    options.model = model
    return options


def _structured_outputs(output: StructuredOutput | None) -> StructuredOutputsParams | None:  # noqa: PLR0911 - one form each
    if output is None:
        return None
    match output.form:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "choices":
            return StructuredOutputsParams(choice=list(output.value))
        case "json_schema":
            return StructuredOutputsParams(json=str(output.value))
        case "regex":
            return StructuredOutputsParams(regex=str(output.value))
        case "grammar":
            return StructuredOutputsParams(grammar=str(output.value))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=str(output.value))


async def _pump(collector: RequestOutputCollector, sink: Sink, call: EngineCall) -> None:
    """Move a request's deltas to its record until it has ended."""
    finished = False
    try:
        while not finished:
            output = cast("RequestOutput", collector.get_nowait() or await collector.get())
            finished = output.finished
            if output.prompt_logprobs is not None:
                prompt = cast("FlatLogprobs", output.prompt_logprobs)
                sink.take_prompt_logprobs(
                    *_columns(prompt, call.prompt_token_ids, call.sampling.prompt_logprobs or 0, first=1)
                )
            for completion in output.outputs:
                _take(completion, sink, call.sampling.top_logprobs or 0)
    except EngineDeadError:
        sink.fail(EngineDead("the engine died while it sampled this call"))
    except Exception as error:
        logger.exception("vLLM failed the call %s", call.call_id)
        sink.fail(error)
    finally:
        collector.close()


def _take(completion: CompletionOutput, sink: Sink, k: int) -> None:
    token_ids = completion.token_ids
    if token_ids:
        if completion.logprobs is None:
            sink.fail(CallError("vLLM gave no log-probabilities for sampled tokens"))
            return
        logprobs, top = _columns(cast("FlatLogprobs", completion.logprobs), token_ids, k)
        sink.append(completion.index, token_ids, logprobs, top_logprobs=top)
    if completion.finish_reason is None:
        return
    if completion.finish_reason == "error":
        sink.fail(CallError("vLLM ended this call with an error"))
    else:
        sink.finish(completion.index, FinishReason(completion.finish_reason), completion.stop_reason)


def _columns(
    flat: FlatLogprobs, token_ids: Sequence[int], k: int, *, first: int = 0
) -> tuple[list[float], TopLogprobs | None]:
    """Return the log-probability of each of `token_ids[first:]`, found by its id, and the `k` best at each position.

    vLLM lists the given token first and then the k best; where the token is among the best, it stands there twice in
    rank and once in the list. Raises `KeyError` where a position lacks its token.
    """
    own: list[float] = []
    top_ids: list[int] = []
    top_values: list[float] = []
    for position in range(first, len(token_ids)):
        start, end = flat.start_indices[position], flat.end_indices[position]
        values = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        own.append(values[token_ids[position]])
        best = sorted(values.items(), key=lambda item: -item[1])[:k] if k else []
        top_ids.extend(token_id for token_id, _ in best)
        top_values.extend(value for _, value in best)
    return own, TopLogprobs(k, top_ids, top_values) if k else None


def _describe(engine: AsyncLLM, tokenizer_directory: Path) -> Model:
    config = engine.model_config
    defaults = config.get_diff_sampling_param()
    known = {name: value for name, value in defaults.items() if name in Sampling.__dataclass_fields__}
    generation = config.try_get_generation_config()
    eos = cast("int | list[int] | None", generation.get("eos_token_id", config.hf_text_config.eos_token_id))
    return Model(
        name=config.served_model_name if isinstance(config.served_model_name, str) else config.model,
        max_context_tokens=config.max_model_len,
        vocabulary_size=config.get_vocab_size(),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
        logprobs_mode=LogprobsMode.PROCESSED if config.logprobs_mode.startswith("processed") else LogprobsMode.RAW,
        default_sampling=Sampling(**known),
        max_top_logprobs=config.max_logprobs if config.max_logprobs >= 0 else config.get_vocab_size(),
        engine="vllm",
        engine_version=vllm.__version__,
        tokenizer_directory=tokenizer_directory,
    )


def _tokenizer_directory(engine: AsyncLLM) -> Path:
    name = engine.model_config.tokenizer
    if Path(name).is_dir():
        return Path(name)
    # The engine has loaded it by this name already, so that it lies in the cache.
    return Path(
        huggingface_hub.snapshot_download(
            name, revision=engine.model_config.tokenizer_revision, allow_patterns=list(TOKENIZER_FILES)
        )
    )
