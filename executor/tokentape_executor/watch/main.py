"""The command `tokentape-watch`."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from types import FrameType

from rich.console import Console

from tokentape_executor.errors import ExecutorError, RolloutError, TapeLost
from tokentape_executor.reader_tokens import STANDARD_INPUT, ReadableTape, ReaderTokensError, read_reader_tokens
from tokentape_executor.watch.arguments import (
    DEFAULT_SIDECAR,
    DEFAULT_SPEED,
    FollowOptions,
    ReplayOptions,
    WatchOptions,
    parse,
)
from tokentape_executor.watch.look import Ids, Look
from tokentape_executor.watch.problems import explain
from tokentape_executor.watch.show import Shown, show, shown_on
from tokentape_executor.watch.sources import followed, pieces_for, replayed, stored

_PLAIN_WIDTH = 120
_SIGNALLED = 128
_POLL_SECONDS = 0.3
_SHORT_ID = 13


class SourceFailed(ExecutorError):
    """A sidecar did not give the tape; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tokentape-watch` and return its exit status; `--help` lists them."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _leave)
    try:
        asyncio.run(_watch(options, _console(options)))
    except SourceFailed as error:
        return _say(error, 1)
    except ExecutorError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        # Whoever read it has seen enough; the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGNALLED + signal.SIGPIPE
    return 0


def _say(error: ExecutorError, status: int) -> int:
    print(f"tokentape-watch: {error}", file=sys.stderr)  # noqa: T201 - a command's own output
    return status


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(_SIGNALLED + number)


def _console(options: WatchOptions) -> Console:
    if options.plain:
        return Console(width=_PLAIN_WIDTH, color_system=None, highlight=False)
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH, highlight=False)


async def _watch(options: WatchOptions, console: Console) -> None:
    match options.source:
        case FollowOptions():
            async for readable in _wanted(options.source):
                await _follow(readable, options.source, options, console)
        case ReplayOptions():
            await _replay(options.source, options, console)


async def _wanted(options: FollowOptions) -> AsyncGenerator[ReadableTape]:
    """Yield the tapes to follow; those that are not opened yet are waited for."""
    seen = 0
    while True:
        tapes = read_reader_tokens(options.reader_tokens)
        if options.all_tapes:
            for readable in tapes[seen:]:
                yield readable
            seen = len(tapes)
        elif options.tape_id is not None:
            yield _named(options.tape_id, tapes, options)
            return
        elif tapes:
            yield tapes[-1]
            return
        if options.reader_tokens == STANDARD_INPUT:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _named(tape_id: str, tapes: Sequence[ReadableTape], options: FollowOptions) -> ReadableTape:
    found = [readable for readable in tapes if readable.tape.tape_id.startswith(tape_id)]
    if len({readable.tape.tape_id for readable in found}) != 1:
        number = "no tape" if not found else f"{len(found)} tapes"
        raise ReaderTokensError(f"{options.reader_tokens} has {number} whose id begins with {tape_id}")
    return found[-1]


async def _follow(readable: ReadableTape, source: FollowOptions, options: WatchOptions, console: Console) -> None:
    tape_id = readable.tape.tape_id
    address = source.sidecar or readable.address or DEFAULT_SIDECAR
    shown = _shown(options, console, f"{tape_id[:_SHORT_ID]}…")
    text = options.look.ids is not Ids.INSTEAD
    try:
        await show(followed(readable, address, source, text=text, on_lost=shown.lost), shown)
    except RolloutError as error:
        problem = explain(error, f"{tape_id[:_SHORT_ID]}…", address)
        if not (source.all_tapes and isinstance(error, TapeLost)):
            raise SourceFailed(problem) from error
        # Of all tapes, those that are gone are no reason to stop.
        shown.say(problem)


async def _replay(source: ReplayOptions, options: WatchOptions, console: Console) -> None:
    tape = stored(source)
    pieces = None if options.look.ids is Ids.INSTEAD else pieces_for(tape, source)
    shown = _shown(options, console, f"{source.tapes.name} {source.tape}")
    if pieces is None and options.look.ids is not Ids.INSTEAD:
        shown.say(f"{tape.model.name}: its tokenizer is not here, so ids are shown; --tokenizer DIR gives them text")
    live = console.is_terminal and not options.plain and not options.json
    await show(replayed(tape, pieces, source.speed or (DEFAULT_SPEED if live else math.inf)), shown)


def _shown(options: WatchOptions, console: Console, name: str) -> Shown:
    look: Look = options.look
    return shown_on(console, look, name, plain=options.plain, as_json=options.json)
