"""The sidecar's settings: read once, from the command line and the file of `--config`, and frozen."""

from __future__ import annotations

import argparse
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokentape.config import ConfigurableParser, split_at_dashes
from tokentape.keepalive import DEFAULT_KEEPALIVE, Keepalive
from tokentape.listen import ListenAddress, UnixAddress, parse_address
from tokentape.logs import LogFormat
from tokentape.process import add_serving_options, add_telemetry_options
from tokentape.tls import ServerTls, add_tls_options, refuse_unguarded, tls_from
from tokentape_sidecar.limits import DEFAULT_LIMITS, Limits
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS

_EPILOG = """\
examples:
  # vLLM on this machine; what follows -- goes to vLLM as it stands
  tokentape-sidecar --model ./SmolLM2-135M-Instruct -- --dtype bfloat16 --max-model-len 2048

  # no model: replay a script (sidecar/README.md has the format)
  tokentape-sidecar --engine scripted --script toy.json --tokenizer ./SmolLM2-135M-Instruct

  # the same from a file, its keys named like the options; the command line wins
  printf 'model = "./SmolLM2-135M-Instruct"\\nvllm = {dtype = "bfloat16", max-model-len = 2048}\\n' > sidecar.toml
  tokentape-sidecar --config sidecar.toml --listen 127.0.0.1:0

  # then, from another terminal
  grpcurl -plaintext 127.0.0.1:50051 list
  grpcurl -plaintext -d '{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}' \\
    127.0.0.1:50051 tokentape.v1.GenerationService/Generate
"""


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a gRPC server listens, and whom it lets in."""

    address: ListenAddress | UnixAddress
    token_file: Path | None = None
    """Bearer tokens, any of which lets in; `None`: none is asked for."""
    tls: ServerTls | None = None
    """Never on a Unix socket."""
    token_option: str = "--token-file"  # noqa: S105 - its name
    """The option that gave `token_file`, for messages."""
    keepalive: Keepalive = DEFAULT_KEEPALIVE
    """How it notices clients that are gone without a word."""


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


_DEFAULT_CONTROL = UnixAddress(Path("/"))
"""Stands for the socket whose name the sidecar's name tells."""


def _sidecar_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 64 letters, digits, '-' or '_'")
    return text


def _lora(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise argparse.ArgumentTypeError(f"{text!r} must be of the form NAME=DIR")
    return name, Path(directory)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0")
    return seconds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def _parser() -> ConfigurableParser:
    parser = ConfigurableParser(
        passes_on=True,
        prog="tokentape-sidecar",
        description="Serve an inference engine over gRPC: token ids in, token ids and log-probabilities out, every "
        "rollout recorded on a tape.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --model MODEL [options] [-- VLLM OPTIONS]\n       "
        "%(prog)s --engine scripted --script FILE --tokenizer DIR [options]\n       "
        "%(prog)s --config FILE [options]",
    )
    _add_vllm_options(parser)
    _add_scripted_options(parser)
    add_serving_options(parser, default_listen="127.0.0.1:50051", unix=True)
    _add_name_option(parser)
    _add_access_options(parser)
    add_tls_options(parser)
    _add_control_options(parser)
    _add_limit_options(parser)
    _add_end_options(parser)
    add_telemetry_options(parser, metrics="metrics, vLLM's own among them,")
    return parser


def _add_vllm_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine: vLLM, in this process")
    group.add_argument("--engine", choices=["vllm", "scripted"], default="vllm", help="default: vllm")
    group.add_argument("--model", help="a model directory, or a name that vLLM can load")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: as --model)")
    group.add_argument(
        "--logprobs-mode",
        choices=["processed", "raw"],
        default="processed",
        help="log-probabilities of the distribution that is sampled from, or of the model's raw softmax "
        "(default: processed)",
    )
    group.add_argument(
        "--lora",
        type=_lora,
        action="append",
        default=[],
        dest="loras",
        metavar="NAME=DIR",
        help="serve the LoRA adapter in DIR (PEFT's format) as well, under this name; may be repeated",
    )


def _add_scripted_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine: scripted, which replays a file and needs no model")
    group.add_argument("--script", type=Path, metavar="FILE", help="what to replay")
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="a directory with a tokenizer.json")


def _add_name_option(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tapes")
    group.add_argument(
        "--name",
        type=_sidecar_name,
        default="main",
        help="this sidecar's name: the part of its tapes' ids before the dot (default: main)",
    )


def _add_end_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stopping, and an engine that stalls")
    group.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long running calls may go on after SIGTERM or SIGINT (default: 10); a second signal exits at once",
    )
    group.add_argument(
        "--stall-limit",
        type=_seconds,
        default=DEFAULT_STALL_LIMIT_SECONDS,
        dest="stall_limit_seconds",
        metavar="S",
        help="when calls run and the engine has emitted nothing for this long, they fail with UNAVAILABLE and no more "
        f"are taken until it answers again; 0: never (default: {DEFAULT_STALL_LIMIT_SECONDS:g})",
    )


def _add_access_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access", "an address that other machines reach needs both a token and TLS")
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="serve only those who show a bearer token of this file (one a line); it is read again whenever it changes "
        "(default: no token is needed)",
    )


def _add_control_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("control", "the trainer's controls: pause, weights, sleep; off unless asked for")
    group.add_argument(
        "--control",
        type=parse_address,
        nargs="?",
        const=_DEFAULT_CONTROL,
        metavar="ADDRESS",
        help="serve the controls at unix:/PATH or HOST:PORT; without ADDRESS on a Unix socket of this user, "
        "control-NAME.sock in $XDG_RUNTIME_DIR or a directory below the temporary one; HOST:PORT needs "
        "--control-token-file",
    )
    group.add_argument(
        "--control-token-file", type=Path, metavar="FILE", help="as --token-file, for the controls; of its own secrets"
    )
    group.add_argument(
        "--weights-root",
        type=Path,
        metavar="DIR",
        help="let UpdateWeights load checkpoints from directories below DIR (default: it loads none)",
    )


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for option, default, explanation in (
        ("--max-message-bytes", DEFAULT_LIMITS.max_message_bytes, "the largest message that is taken"),
        ("--max-running-calls", DEFAULT_LIMITS.max_running_calls, "calls that run at once, at most"),
        ("--max-tapes", DEFAULT_LIMITS.max_tapes, "tapes held at once, at most"),
        ("--max-tape-bytes", DEFAULT_LIMITS.max_tape_bytes, "memory of one tape, at most"),
        ("--max-watchers-per-tape", DEFAULT_LIMITS.max_watchers_per_tape, "watchers of one tape at once, at most"),
        ("--max-choices", DEFAULT_LIMITS.max_choices, "the largest n of a call"),
        ("--max-top-logprobs", DEFAULT_LIMITS.max_top_logprobs, "the largest top_logprobs and prompt_logprobs"),
    ):
        group.add_argument(
            option, type=_positive, default=default, metavar="N", help=f"{explanation} (default: {default})"
        )


def parse_settings(arguments: list[str]) -> Settings:
    """Read the command line; exits with a usage message where it is wrong."""
    parser = _parser()
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
    if address == _DEFAULT_CONTROL:
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
