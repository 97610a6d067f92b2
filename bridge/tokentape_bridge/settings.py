"""The bridge's settings: read once, from the command line, and frozen."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tokentape.access import Access, access_from, add_access_options
from tokentape.config import ConfigurableParser
from tokentape.listen import ListenAddress
from tokentape.logs import LogFormat
from tokentape.option_types import positive_count, positive_seconds, seconds
from tokentape.process import add_serving_options, add_telemetry_options
from tokentape.tls import ServerTls, add_tls_options, refuse_unguarded, tls_from

_DESCRIPTION = """\
Serve the OpenAI API in front of tokentape sidecars: chat messages become token ids, sampled token ids become text.
The tokenizer comes from the sidecar; no disk is shared and no model is needed here."""

_EXAMPLE = """\
example, with a sidecar named "a" at port 50051:
  tokentape-bridge --sidecar a=127.0.0.1:50051 --listen 127.0.0.1:8000
  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is 2+3?"}], "return_token_ids": true}'

the same from a file, its keys named like the options; the command line wins:
  printf 'listen = "127.0.0.1:8000"\\nsidecar = {a = "127.0.0.1:50051"}\\n' > bridge.toml
  tokentape-bridge --config bridge.toml

To record a request on a tape, give its id as metadata {"tape_id": "a.0123..."} or in the header x-tape-id. The part
before the dot names the sidecar that holds the tape, so one bridge can serve many: repeat --sidecar. Requests without
a tape go to the sidecar that has the fewest. GET /health answers 200 while a sidecar serves, else 503; /metrics is for
Prometheus; /docs has every route. SIGTERM and SIGINT end it gracefully."""

SIDECAR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What a sidecar may be called."""

DEFAULT_MAX_REQUEST_BYTES = 64 * 1024 * 1024
"""As much as a sidecar takes in one message."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How conversations and completions are read."""

    renderer: str | None = None
    """The family of the `renderers` package that reads completions and bridges turns; None: the forms of `answers`."""
    reads_reasoning: bool = True
    """Whether `<think>` is taken for reasoning, or left in the content."""
    continues: bool = True
    """Whether calls on a tape continue earlier ones; otherwise every prompt is rendered anew."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How HTTP is served."""

    api_key_file: Path | None
    """Who has no key of it is refused; see `api_key`. None: everybody is served."""
    tls: ServerTls | None
    """None: plain HTTP is served."""
    max_request_bytes: int
    """The largest body of a request."""
    workers: int
    """Processes that serve the one address."""
    grace_seconds: float
    """How long running requests may go on after the first signal."""
    request_timeout_seconds: float | None
    """How long a request may take that does not say so itself; None: as long as it needs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one bridge process runs with."""

    sidecars: Mapping[str, str]
    """Name of each sidecar (the part of a tape id before the dot) → its gRPC address; at least one without a file."""
    sidecar_file: Path | None
    """Names more of them, and may change; see `sidecar_file`."""
    access: Access
    """How it gets into all of them."""
    listen: ListenAddress
    chat: ChatSettings
    http: HttpSettings
    ready_file: Path | None
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: LogFormat
    otlp_traces_endpoint: str | None
    """Where traces are sent; `None`: none are made."""


def read_arguments(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with those of the file of `--config` in its place. Exits with status 2 where that is wrong."""
    return _parser().with_config(arguments)


def _parser() -> ConfigurableParser:
    parser = ConfigurableParser(
        prog="tokentape-bridge",
        usage="%(prog)s --sidecar NAME=ADDRESS [--sidecar NAME=ADDRESS …] [options]\n"
        "       %(prog)s --sidecar-file FILE [options]\n"
        "       %(prog)s --config FILE [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_sidecar_options(parser)
    add_serving_options(parser, default_listen="127.0.0.1:8000")
    add_access_options(parser)
    _add_http_options(parser)
    add_tls_options(parser)
    _add_chat_options(parser)
    add_telemetry_options(parser)
    return parser


def _add_sidecar_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sidecars; at least one of the two is needed")
    group.add_argument(
        "--sidecar",
        action="append",
        default=[],
        type=_name_and_address,
        metavar="NAME=ADDRESS",
        help="a sidecar's name and its gRPC address, HOST:PORT or unix:/PATH; repeatable",
    )
    group.add_argument(
        "--sidecar-file",
        type=Path,
        metavar="FILE",
        help='more sidecars, a JSON object {"NAME": "ADDRESS"}; read again whenever it changes, so that sidecars come '
        "and go without a restart (replace the file as a whole)",
    )


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line (`sys.argv` when `arguments` is None). Exits with status 2 and a message on a bad one."""
    parser = _parser()
    options = parser.parse_args(parser.with_config(sys.argv[1:] if arguments is None else arguments))
    if not options.sidecar and options.sidecar_file is None:
        parser.error("one of the arguments --sidecar and --sidecar-file is required")
    sidecars = dict[str, str](options.sidecar)
    if len(sidecars) < len(options.sidecar):
        parser.error("argument --sidecar: two sidecars have the same name")
    tls = tls_from(options, parser)
    refuse_unguarded(
        parser, "--listen", options.listen, tls=tls, needed_option="--api-key-file", needed_file=options.api_key_file
    )
    return Settings(
        sidecars=MappingProxyType(sidecars),
        sidecar_file=options.sidecar_file,
        access=access_from(options, parser),
        listen=options.listen,
        chat=ChatSettings(
            renderer=options.renderer,
            reads_reasoning=options.reasoning_parser == "think",
            continues=not options.no_continuation,
        ),
        http=HttpSettings(
            api_key_file=options.api_key_file,
            tls=tls,
            max_request_bytes=options.max_request_bytes,
            workers=options.workers,
            grace_seconds=options.grace_seconds,
            request_timeout_seconds=options.request_timeout,
        ),
        ready_file=options.ready_file,
        log_level=options.log_level,
        log_format=options.log_format,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
    )


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--renderer",
        metavar="NAME",
        help='read completions and bridge turns as this family of the renderers package does ("qwen3", "gpt-oss", …); '
        "by default <think> and <tool_call> are read as text",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=["think", "none"],
        default="think",
        help="take <think> for reasoning, or leave it in the content (default: think)",
    )
    group.add_argument(
        "--no-continuation",
        action="store_true",
        help="render every prompt anew, so that each call on a tape begins a new sample; for comparison",
    )


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="serve only those who send a key of this file (one a line) as Authorization: Bearer KEY or "
        "x-api-key: KEY; it is read again whenever it changes; /health, /version, /metrics and /docs need none "
        "(default: no key is needed)",
    )
    group.add_argument(
        "--max-request-bytes",
        type=positive_count,
        default=DEFAULT_MAX_REQUEST_BYTES,
        metavar="N",
        help=f"answer 413 to a request with a larger body (default: {DEFAULT_MAX_REQUEST_BYTES}, which is 64 MiB)",
    )
    group.add_argument(
        "--workers",
        type=positive_count,
        default=1,
        metavar="N",
        help="processes that serve, each with its own connections to the sidecars (default: 1)",
    )
    group.add_argument(
        "--grace-seconds",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long running requests may go on after SIGTERM or SIGINT (default: 30); a second signal ends them",
    )
    group.add_argument(
        "--request-timeout",
        type=positive_seconds,
        metavar="S",
        help="end a request that takes longer with status 504 and abort its calls at the engine; a request may ask for "
        "less by the header x-request-timeout, in seconds (default: none)",
    )


def _name_and_address(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not address or not SIDECAR_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ADDRESS (as in a=127.0.0.1:50051)")
    return name, address
