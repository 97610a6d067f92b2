"""From the engine port's terms to vLLM's: sampling parameters, engine options, what the model is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import huggingface_hub
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from tokentape_sidecar.engine import LogprobsMode, Model, Sampling, StructuredOutput
from tokentape_sidecar.errors import EngineNotLoaded, InvalidArgument
from tokentape_sidecar.tokenizer_archive import TOKENIZER_FILES

_SAME_NAME = (
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


def engine_arguments(model: str, arguments: Sequence[str], defaults: Mapping[str, object]) -> AsyncEngineArgs:
    """Read vLLM's own command-line options, over `defaults` of ours.

    Raises `EngineNotLoaded` where `model` names a directory that is not there.
    """
    # vLLM would take such a name for a repository of a model hub and look for it there.
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise EngineNotLoaded(f"--model: there is no directory {model}")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="tokentape-sidecar … --"))
    parser.set_defaults(**defaults)
    options = AsyncEngineArgs.from_cli_args(cast("argparse.Namespace", parser.parse_args(list(arguments))))
    options.model = model
    return options


def sampling_params(sampling: Sampling, engine: AsyncLLM) -> SamplingParams:
    """Write sampling parameters for vLLM. Raises `InvalidArgument` where this engine cannot honour one."""
    chunked = engine.vllm_config.scheduler_config.enable_chunked_prefill
    if sampling.seed is not None and current_platform.is_cpu() and chunked:
        raise InvalidArgument(
            "sampling.seed",
            "a seed of its own for a call kills vLLM's CPU engine when prefill is chunked; start it with "
            "--no-enable-chunked-prefill",
        )
    given = {name: value for name in _SAME_NAME if (value := getattr(sampling, name)) is not None}
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
        # Made for one call, they need no deep copy.
        skip_clone=True,
    )


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


def describe(engine: AsyncLLM, tokenizer_directory: Path, lora_names: Sequence[str]) -> Model:
    """Say what `engine` serves; it cannot itself name its adapters."""
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
        lora_names=tuple(lora_names),
    )


def tokenizer_directory_of(engine: AsyncLLM) -> Path:
    """Return where the tokenizer's files lie that `engine` loaded."""
    name = engine.model_config.tokenizer
    if Path(name).is_dir():
        return Path(name)
    # The engine has loaded it by this name already, so that it lies in the cache.
    return Path(
        huggingface_hub.snapshot_download(
            name, revision=engine.model_config.tokenizer_revision, allow_patterns=list(TOKENIZER_FILES)
        )
    )
