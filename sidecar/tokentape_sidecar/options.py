"""The sidecar's options, as `--help` tells them; `settings` says which go together."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tokentape.config import ConfigurableParser
from tokentape.listen import UnixAddress, parse_address
from tokentape.option_types import positive_count, seconds
from tokentape.process import add_serving_options, add_telemetry_options
from tokentape.tls import add_tls_options
from tokentape_sidecar.limits import DEFAULT_LIMITS
from tokentape_sidecar.stall import DEFAULT_STALL_LIMIT_SECONDS
from tokentape_sidecar.tape import SIDECAR_NAME

_LEAST_MESSAGE_BYTES = 2 * 1024 * 1024
_MOST_MESSAGE_BYTES = 2**31 - 1

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

DEFAULT_CONTROL = UnixAddress(Path("/"))
"""Stands for the socket whose name the sidecar's name tells."""


def make_parser() -> ConfigurableParser:
    """Return the parser of the command line, and of the file of `--config`."""
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


def _sidecar_name(text: str) -> str:
    if not re.fullmatch(SIDECAR_NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 64 letters, digits, '-' or '_'")
    return text


def _lora(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise argparse.ArgumentTypeError(f"{text!r} must be of the form NAME=DIR")
    return name, Path(directory)


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
        type=seconds,
        default=10.0,
        metavar="S",
        help="how long running calls may go on after SIGTERM or SIGINT (default: 10); a second signal exits at once",
    )
    group.add_argument(
        "--stall-limit",
        type=seconds,
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
        const=DEFAULT_CONTROL,
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


def _message_bytes(text: str) -> int:
    read = positive_count(text)
    if read < _LEAST_MESSAGE_BYTES:
        # Clients put calls of up to 1 MiB into a message, and one that is refused ends all calls of its stream.
        raise argparse.ArgumentTypeError(f"{text!r} is below {_LEAST_MESSAGE_BYTES}, what clients may put together")
    if read > _MOST_MESSAGE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is above {_MOST_MESSAGE_BYTES}, gRPC's own limit")
    return read


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    most = DEFAULT_LIMITS.max_message_bytes
    group.add_argument(
        "--max-message-bytes",
        type=_message_bytes,
        default=most,
        metavar="N",
        help=f"the largest message that is taken, at least {_LEAST_MESSAGE_BYTES} (default: {most})",
    )
    for option, default, explanation in (
        ("--max-running-calls", DEFAULT_LIMITS.max_running_calls, "calls that run at once, at most"),
        ("--max-tapes", DEFAULT_LIMITS.max_tapes, "tapes held at once, at most"),
        ("--max-tape-bytes", DEFAULT_LIMITS.max_tape_bytes, "memory of one tape, at most"),
        ("--max-watchers-per-tape", DEFAULT_LIMITS.max_watchers_per_tape, "watchers of one tape at once, at most"),
        ("--max-choices", DEFAULT_LIMITS.max_choices, "the largest n of a call"),
        ("--max-top-logprobs", DEFAULT_LIMITS.max_top_logprobs, "the largest top_logprobs and prompt_logprobs"),
    ):
        group.add_argument(
            option, type=positive_count, default=default, metavar="N", help=f"{explanation} (default: {default})"
        )
