"""The sidecar's settings: read once, from the command line and the file of `--config`, and frozen."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokentape.config import split_at_dashes
from tokentape.listen import ListenAddress, UnixAddress
from tokentape.logs import LogFormat
from tokentape.tls import ServerTls, refuse_unguarded, tls_from
from tokentape_sidecar.limits import Limits
from tokentape_sidecar.listener import Listener
from tokentape_sidecar.options import DEFAULT_CONTROL, make_parser


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sidecar process was told; see `--help`."""

    engine: Literal["vllm", "scripted"]
    data: Listener
    control: Listener | None
    """Where the trainer's controls are served; `None`: nowhere."""
    weights_root: Path | None
    """Below which checkpoints are loaded from; `None`: none are."""
    metrics_listen: ListenAddress | None
    """Where Prometheus finds the metrics; `None`: nowhere."""
    otlp_traces_endpoint: str | None
    limits: Limits
    name: str
    ready_file: Path | None
    log_level: str
    log_format: LogFormat
    grace_seconds: float
    stall_limit_seconds: float
    model: str | None
    served_model_name: str | None
    logprobs_mode: Literal["processed", "raw"]
    loras: Mapping[str, Path]
    script: Path | None
    tokenizer: Path | None
    vllm_arguments: tuple[str, ...]


def parse_settings(arguments: list[str]) -> Settings:
    """Read the command line; exits with a usage message where it is wrong."""
    parser = make_parser()
    own, vllm_arguments = split_at_dashes(parser.with_config(arguments))
    options = parser.parse_args(own)
    if options.engine == "vllm" and not options.model:
        parser.error("--model is needed (or --engine scripted, to replay a script)")
    if options.engine == "scripted" and not (options.script and options.tokenizer):
        parser.error("--engine scripted needs --script and --tokenizer")
    if options.engine == "scripted" and vllm_arguments is not None:
        parser.error("options after -- are vLLM's; --engine scripted takes none")
    if options.engine == "scripted" and options.loras:
        parser.error("--lora is vLLM's; --engine scripted has the script's model.lora_names")
    if len(dict(options.loras)) < len(options.loras):
        parser.error("--lora: two adapters have the same name")
    return _settings(options, parser, vllm_arguments or [])


def _settings(options: argparse.Namespace, parser: argparse.ArgumentParser, vllm_arguments: Sequence[str]) -> Settings:
    tls = tls_from(options, parser)
    return Settings(
        engine=options.engine,
        data=_data_listener(options, parser, tls),
        control=_control_listener(options, parser, tls),
        weights_root=options.weights_root,
        metrics_listen=options.metrics_listen,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        limits=Limits(
            max_message_bytes=options.max_message_bytes,
            max_running_calls=options.max_running_calls,
            max_tapes=options.max_tapes,
            max_tape_bytes=options.max_tape_bytes,
            max_watchers_per_tape=options.max_watchers_per_tape,
            max_choices=options.max_choices,
            max_top_logprobs=options.max_top_logprobs,
        ),
        name=options.name,
        ready_file=options.ready_file,
        log_level=options.log_level,
        log_format=options.log_format,
        grace_seconds=options.grace_seconds,
        stall_limit_seconds=options.stall_limit_seconds,
        model=options.model,
        served_model_name=options.served_model_name,
        logprobs_mode=options.logprobs_mode,
        loras=dict(options.loras),
        script=options.script,
        tokenizer=options.tokenizer,
        vllm_arguments=tuple(vllm_arguments),
    )


def _data_listener(options: argparse.Namespace, parser: argparse.ArgumentParser, tls: ServerTls | None) -> Listener:
    address, token_file = options.listen, options.token_file
    refuse_unguarded(parser, "--listen", address, tls=tls, needed_option="--token-file", needed_file=token_file)
    return Listener(address, token_file, _unless_unix(address, tls))


def _unless_unix(address: ListenAddress | UnixAddress, tls: ServerTls | None) -> ServerTls | None:
    return None if isinstance(address, UnixAddress) else tls


def _control_listener(
    options: argparse.Namespace, parser: argparse.ArgumentParser, tls: ServerTls | None
) -> Listener | None:
    address, token_file = options.control, options.control_token_file
    if address is None:
        for option, value in (("--control-token-file", token_file), ("--weights-root", options.weights_root)):
            if value is not None:
                parser.error(f"{option} needs --control")
        return None
    if address is DEFAULT_CONTROL:
        address = UnixAddress(_runtime_directory() / f"control-{options.name}.sock")
    if isinstance(address, ListenAddress) and token_file is None:
        parser.error(f"--control: {address} needs --control-token-file")
    refuse_unguarded(
        parser, "--control", address, tls=tls, needed_option="--control-token-file", needed_file=token_file
    )
    if None not in {token_file, options.token_file} and token_file.resolve() == options.token_file.resolve():
        parser.error("--control-token-file: must be another file than --token-file: who may sample may not control")
    return Listener(address, token_file, _unless_unix(address, tls), "--control-token-file")


def _runtime_directory() -> Path:
    """Return this user's directory for sockets."""
    directory = os.environ.get("XDG_RUNTIME_DIR")
    return Path(directory) if directory else Path(tempfile.gettempdir()) / f"tokentape-{os.getuid()}"
