"""The live part of a terminal's view: what running calls sample now, and how the tape stands.

It stays below what is printed, is drawn on the event loop's own beat, and is gone in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from tokentape_executor.shades import probability_legend
from tokentape_executor.watch import blocks, words
from tokentape_executor.watch.blocks import LABEL_WIDTH, Row
from tokentape_executor.watch.look import MARKUP, Look
from tokentape_executor.watch.printer import grid
from tokentape_executor.watch.reel import Call, Choice, Reel

_FRAME_SECONDS = 0.12
_TAIL_TOKENS = 300
_SHOWN_CHOICES = 4
_ROWS_BESIDES = 6
"""Rows of the screen that are kept for other than sampled text."""


class Screen:
    """What is seen of a reel below the printed blocks."""

    def __init__(self, console: Console, reel: Reel, look: Look, name: str) -> None:
        """`name` says which tape it is."""
        self._console = console
        self._reel = reel
        self._look = look
        self._name = name
        self.note = ""
        """What is going on, where it is not the tape."""

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncGenerator[None]:
        """Show it in this block."""
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            drawing = asyncio.create_task(self._draw(live))
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.wait({drawing})
                # What is drawn last must not be older than what is printed.
                live.update(self.renderable())

    async def _draw(self, live: Live) -> None:
        while True:
            live.update(self.renderable(), refresh=True)
            await asyncio.sleep(_FRAME_SECONDS)

    def renderable(self) -> RenderableType:
        """Return it as it is now."""
        growing = [(call, choice) for call in self._reel.running for choice in _growing(call)]
        shown = growing[-_SHOWN_CHOICES:]
        rows = max(1, (self._console.height - _ROWS_BESIDES) // max(1, len(shown)))
        parts: list[RenderableType] = [self._tail(call, choice, rows) for call, choice in shown]
        if len(growing) > len(shown):
            parts.append(Text(f"{len(growing) - len(shown)} more sample meanwhile", MARKUP))
        below = [self._status(), probability_legend()]
        for line in below:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*parts, Rule(style="bright_black"), *below)

    def _tail(self, call: Call, choice: Choice, rows: int) -> RenderableType:
        text = blocks.choice_text(choice, self._look, max(0, len(choice.token_ids) - _TAIL_TOKENS))
        lines = text.wrap(self._console, self._console.width - LABEL_WIDTH - 4, overflow="fold")
        several = call.choice_count > 1 or len(list(self._reel.running)) > 1
        label = words.name_of(call) if several else blocks.choice_label(call, choice)
        return grid([Row(label, "bold", Text("\n").join(lines[-rows:]))])

    def _status(self) -> Text:
        reel = self._reel
        running = sum(1 for _ in reel.running)
        parts = [
            words.calls(len(reel.calls)) + (f", {running} running" if running else ""),
            f"{reel.kept} kept, {reel.split} begun anew",
            *([f"{reel.failed} failed"] if reel.failed else []),
            f"{words.tokens(reel.sampled)} sampled",
            *([words.weights_words(reel.weights)] if reel.weights and reel.weights.version else []),
            f"next is {reel.next_sequence or 0}",
        ]
        note = (f"   {self.note}", "bold yellow") if self.note else ""
        return Text.assemble((self._name, "bold"), ("  " + " · ".join(parts), MARKUP), note)


def _growing(call: Call) -> Iterator[Choice]:
    """Yield the choices that have begun and not ended."""
    return (choice for choice in call.choices.values() if choice.completion is None and choice.token_ids)
