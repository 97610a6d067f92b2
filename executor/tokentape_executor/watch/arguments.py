"""The command line of `tokentape-watch`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tokentape.access import Access, access_from, add_access_options
from tokentape.config import ConfigurableParser
from tokentape.listen import parse_address
from tokentape.option_types import count, positive_seconds
from tokentape_executor.watch.look import Ids, Look

DEFAULT_SIDECAR = "127.0.0.1:50051"
DEFAULT_SPEED = 60.0
"""On a terminal, in tokens per second."""

_DEFAULT_PATIENCE_SECONDS = 10.0

_USAGE = """\
%(prog)s --reader-tokens FILE [TAPE_ID] [--sidecar ADDRESS] [options]
       %(prog)s --replay TAPES [--tape N] [--tokenizer DIR] [--speed N] [options]"""

_DESCRIPTION = """\
Look at a tape: follow it at its sidecar while it is recorded, or replay one from a file.

Prompts are in the colours of their roles, as far as the chat template's special tokens tell them. Every sampled token
is in a colour that says how probable it was: the less likely, the more it glows. Each call says which call it
continues, or why it begins anew; other weights are marked at the token where they come into force. What running calls
sample is below until they end."""

_EPILOG = """\
reader tokens:
  Reading a tape takes its reader token. tokentape-rollout --reader-tokens FILE writes a line to FILE for each tape that
  it opens: TAPE_ID READER_TOKEN ADDRESS. A line of your own needs no ADDRESS. A token is never given on the command
  line, where others could see it.

examples:
  # the tape that a run has opened last; then all of its tapes, one after the other
  tokentape-rollout prompts.jsonl -o results.jsonl --sidecar 127.0.0.1:50051 --reader-tokens out/readers &
  tokentape-watch --reader-tokens out/readers
  tokentape-watch --reader-tokens out/readers --all

  # one of them, by the beginning of its id, with the ids beside the text
  tokentape-watch --reader-tokens out/readers main.3f2a --ids beside

  # the fourth tape of a file, 20 tokens per second
  tokentape-watch --replay tapes.jsonl --tape 3 --tokenizer ./SmolLM2-135M-Instruct --speed 20

  # as JSON lines, for other programs: the contract's TapeEntry
  tokentape-watch --reader-tokens out/readers --json | jq .tokens_sampled.weight_version

exit status:
  0  the tape was shown to its end
  1  the sidecar has no such tape, does not let this token read it, or does not answer
  2  the command line or a file cannot be used
  130, 143  ended by SIGINT (Ctrl-C), SIGTERM
"""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """Follow tapes at their sidecars."""

    reader_tokens: Path
    tape_id: str | None
    """The beginning of its id; `None`: the latest."""
    all_tapes: bool
    sidecar: str | None
    """Its address; `None`: what the file says."""
    from_sequence: int
    patience_seconds: float
    access: Access


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Replay a tape of a file."""

    tapes: Path
    tape: int
    tokenizer: Path | None
    speed: float | None
    """In tokens per second; infinite: all at once; `None`: as suits the output."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What to watch, and how it is shown."""

    source: Source
    look: Look
    plain: bool
    json: bool


Source: TypeAlias = FollowOptions | ReplayOptions


def parse(arguments: Sequence[str]) -> WatchOptions:
    """Read the command line. Exits with status 2 and a message where it is wrong."""
    parser = _make_parser()
    told = parser.parse_args(parser.with_config(arguments))
    if (told.reader_tokens is None) == (told.replay is None):
        parser.error("give either --reader-tokens FILE, to follow a tape, or --replay TAPES")
    source = _follow_options(told, parser) if told.replay is None else _replay_options(told, parser)
    return WatchOptions(source, Look(Ids(told.ids), full=told.full), plain=told.plain, json=told.json)


def _follow_options(told: argparse.Namespace, parser: argparse.ArgumentParser) -> FollowOptions:
    if told.all and told.tape_id is not None:
        parser.error("give either TAPE_ID or --all")
    if told.all and told.from_sequence:
        parser.error("--from is for one tape, and not for --all")
    return FollowOptions(
        reader_tokens=told.reader_tokens,
        tape_id=told.tape_id,
        all_tapes=told.all,
        sidecar=None if told.sidecar is None else str(told.sidecar),
        from_sequence=told.from_sequence,
        patience_seconds=told.patience,
        access=access_from(told, parser),
    )


def _replay_options(told: argparse.Namespace, parser: argparse.ArgumentParser) -> ReplayOptions:
    if told.tape_id is not None or told.all:
        parser.error("tapes in a file are told by --tape N: TAPE_ID and --all are for --reader-tokens")
    return ReplayOptions(told.replay, told.tape, told.tokenizer, told.speed)


def _make_parser() -> ConfigurableParser:
    parser = ConfigurableParser(
        prog="tokentape-watch",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tape_id", nargs="?", metavar="TAPE_ID", help="a tape of FILE, by its id's beginning")
    for add in (_add_follow, _add_replay, _add_look, add_access_options):
        add(parser)
    return parser


def _add_follow(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("following")
    group.add_argument(
        "--reader-tokens",
        type=Path,
        metavar="FILE",
        help="tapes and their reader tokens (below); - is standard input; without TAPE_ID the latest is shown",
    )
    group.add_argument("--all", action="store_true", help="show all tapes of FILE, also those that come to it later")
    group.add_argument(
        "--sidecar",
        type=parse_address,
        metavar="ADDRESS",
        help=f"the sidecar, HOST:PORT or unix:/PATH (default: FILE's, else {DEFAULT_SIDECAR})",
    )
    group.add_argument(
        "--from", dest="from_sequence", type=count, default=0, metavar="N", help="begin at this sequence number"
    )
    group.add_argument(
        "--patience",
        type=positive_seconds,
        default=_DEFAULT_PATIENCE_SECONDS,
        metavar="S",
        help="how many seconds to try to get back to a lost sidecar, without missing a token (default: %(default)g)",
    )


def _add_replay(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replaying")
    group.add_argument("--replay", type=Path, metavar="TAPES", help="a file of tapes (docs/tape-file.md)")
    group.add_argument("--tape", type=count, default=0, metavar="N", help="which tape of it, from 0 (default: 0)")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="has a tokenizer.json, which gives ids their text (default: the model's directory, if it is here)",
    )
    group.add_argument(
        "--speed",
        type=_speed,
        metavar="N",
        help=f"tokens per second; 0: all at once (default: {DEFAULT_SPEED:g} on a terminal, else 0)",
    )


def _add_look(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is shown")
    group.add_argument(
        "--ids",
        choices=[ids.value for ids in Ids],
        default=Ids.NO.value,
        help="token ids beside the text or instead of it (default: %(default)s)",
    )
    group.add_argument("--full", action="store_true", help="show long prompts whole")
    group.add_argument(
        "--plain",
        action="store_true",
        help="lines, without colours and without what moves; the default without a terminal",
    )
    group.add_argument("--json", action="store_true", help="entries as JSON lines, with the contract's field names")


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 <= speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return speed or math.inf
