"""One tape, from its source to where it is shown."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from typing import Protocol

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from tokentape.v1 import tape_pb2
from tokentape_executor.watch.look import Look
from tokentape_executor.watch.printer import Printer
from tokentape_executor.watch.reel import Reel
from tokentape_executor.watch.screen import Screen


class Shown(Protocol):
    """Where one tape is shown."""

    def take(self, entry: tape_pb2.TapeEntry) -> None:
        """Show the next entry."""
        ...

    def say(self, text: str) -> None:
        """Tell what is no part of the tape."""
        ...

    def lost(self) -> None:
        """Tell that the connection is lost, and that it is tried again."""
        ...

    def open(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Show it in this block."""
        ...


class JsonLines:
    """Entries for programs."""

    def take(self, entry: tape_pb2.TapeEntry) -> None:
        """Write a line."""
        line = json.dumps(MessageToDict(entry, preserving_proto_field_name=True), separators=(",", ":"))
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Write a remark to standard error: it is no entry."""
        print(text, file=sys.stderr)  # noqa: T201 - a command's own output

    def lost(self) -> None:
        """Leave it out: no entry is missed."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Nothing needs to be opened."""
        yield


class Plain:
    """Blocks of lines."""

    def __init__(self, console: Console, look: Look) -> None:
        self._reel = Reel()
        self._printer = Printer(console, look, plain=True)
        self._lost = False

    def take(self, entry: tape_pb2.TapeEntry) -> None:
        """Print what there is to print."""
        self._lost = False
        if happening := self._reel.take(entry):
            self._printer.show(happening)

    def say(self, text: str) -> None:
        """Print a remark."""
        self._printer.say(text)

    def lost(self) -> None:
        """Say it once."""
        if not self._lost:
            self._printer.say(LOST)
        self._lost = True

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Nothing needs to be opened."""
        yield


class Terminal:
    """Blocks above, and what is going on below."""

    def __init__(self, console: Console, look: Look, name: str) -> None:
        self._reel = Reel()
        self._printer = Printer(console, look, plain=False)
        self._screen = Screen(console, self._reel, look, name)

    def take(self, entry: tape_pb2.TapeEntry) -> None:
        """Print or draw it."""
        self._screen.note = ""
        if happening := self._reel.take(entry):
            self._printer.show(happening)

    def say(self, text: str) -> None:
        """Print a remark."""
        self._printer.say(text)

    def lost(self) -> None:
        """Show it below until the next entry."""
        self._screen.note = LOST

    def open(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Draw what is going on in this block."""
        return self._screen.shown()


LOST = "the sidecar is away; trying to get back, from where we were"


def shown_on(console: Console, look: Look, name: str, *, plain: bool, as_json: bool) -> Shown:
    """Return where a tape of this name is shown."""
    if as_json:
        return JsonLines()
    if plain or not console.is_terminal:
        return Plain(console, look)
    return Terminal(console, look, name)


async def show(entries: AsyncGenerator[tape_pb2.TapeEntry], shown: Shown) -> None:
    """Show a tape to its end. Raises what `entries` raises."""
    async with shown.open(), contextlib.aclosing(entries):
        async for entry in entries:
            shown.take(entry)
