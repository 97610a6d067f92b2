"""The bridge's settings: read once, from the command line, and frozen."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tokentape.process import ListenAddress, add_server_options

_DESCRIPTION = """\
Serve the OpenAI API in front of tokentape sidecars: chat messages become token ids, sampled token ids become text.
The tokenizer comes from the sidecar; no disk is shared and no model is needed here."""

_EXAMPLE = """\
example, with a sidecar named "a" at port 50051:
  tokentape-bridge --sidecar a=127.0.0.1:50051 --listen 127.0.0.1:8000
  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is 2+3?"}], "return_token_ids": true}'

To record a request on a tape, give its id as metadata {"tape_id": "a.0123..."} or in the header x-tape-id. The part
before the dot names the sidecar that holds the tape, so one bridge can serve many: repeat --sidecar. Requests without
a tape go to the sidecar that has the fewest. GET /health answers 200 while a sidecar serves, else 503."""

_SIDECAR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


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
class Settings:
    """What one bridge process runs with."""

    sidecars: Mapping[str, str]
    """Name of each sidecar (the part of a tape id before the dot) → its gRPC address; at least one."""
    listen: ListenAddress
    chat: ChatSettings
    ready_file: Path | None
    log_level: Literal["debug", "info", "warning", "error"]


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line (`sys.argv` when `arguments` is None). Exits with status 2 and a message on a bad one."""
    parser = argparse.ArgumentParser(
        prog="tokentape-bridge",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sidecar",
        action="append",
        required=True,
        type=_name_and_address,
        metavar="NAME=ADDRESS",
        help="a sidecar's name and its gRPC address, HOST:PORT or unix:/PATH; repeatable",
    )
    _add_chat_options(parser)
    add_server_options(parser, default_listen="127.0.0.1:8000")
    options = parser.parse_args(arguments)
    sidecars = dict[str, str](options.sidecar)
    if len(sidecars) < len(options.sidecar):
        parser.error("argument --sidecar: two sidecars have the same name")
    return Settings(
        sidecars=MappingProxyType(sidecars),
        listen=options.listen,
        chat=ChatSettings(
            renderer=options.renderer,
            reads_reasoning=options.reasoning_parser == "think",
            continues=not options.no_continuation,
        ),
        ready_file=options.ready_file,
        log_level=options.log_level,
    )


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--renderer",
        metavar="NAME",
        help='read completions and bridge turns as this family of the renderers package does ("qwen3", "gpt-oss", …); '
        "by default <think> and <tool_call> are read as text",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=["think", "none"],
        default="think",
        help="take <think> for reasoning, or leave it in the content (default: think)",
    )
    parser.add_argument(
        "--no-continuation",
        action="store_true",
        help="render every prompt anew, so that each call on a tape begins a new sample; for comparison",
    )


def _name_and_address(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not address or not _SIDECAR_NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ADDRESS (as in a=127.0.0.1:50051)")
    return name, address
