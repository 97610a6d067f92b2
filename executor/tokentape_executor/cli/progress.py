"""How far a run has got: a live display on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tokentape_executor.cli.summary import Totals

LINE_SECONDS = 5.0
"""How often a line is printed where there is no terminal."""

_WINDOW_SECONDS = 10.0
_BAR_WIDTH = 40
_FRAMES_PER_SECOND = 4


class TokenRate:
    """Tokens sampled, in all and per second of late."""

    def __init__(self) -> None:
        self.total = 0
        self._started = time.monotonic()
        self._marks: deque[tuple[float, int]] = deque([(self._started, 0)])
        """Times, and the total then; the first one is as old as the window, or the oldest."""

    def add(self, count: int) -> None:
        """Count tokens that were sampled just now."""
        self.total += count

    def per_second(self) -> float:
        """Return the rate over the last seconds."""
        now = time.monotonic()
        self._marks.append((now, self.total))
        while self._marks[1][0] < now - _WINDOW_SECONDS:
            self._marks.popleft()
        since, before = self._marks[0]
        return (self.total - before) / (now - since) if now > since else 0.0


class _Warnings(logging.Handler):
    """Prints what is logged above the live display; each message once, as a thousand rollouts may have the same."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._printed:
            self._printed.add(message)
            self._console.print(Text(f"{record.levelname.lower()}: {message}", "yellow"), soft_wrap=True)


class Progress:
    """A run's progress. `totals` and `tokens` are counted by others; here they are shown."""

    def __init__(self, console: Console, totals: Totals, wanted: int) -> None:
        """`wanted`: how many rollouts there will be in the end, those of `totals` included."""
        self.console = console
        self.tokens = TokenRate()
        self.running = 0
        """Rollouts that run now."""
        self.note = "starting"
        """What is going on, where it is not rollouts."""
        self._totals = totals
        self._wanted = wanted

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncGenerator[None]:
        """Show the progress in this block, and the warnings that are logged meanwhile."""
        handler = _Warnings(self.console)
        logging.getLogger().addHandler(handler)
        try:
            async with self._live() if self.console.is_terminal else self._lines():
                yield
        finally:
            logging.getLogger().removeHandler(handler)

    def line(self) -> str:
        """Return the figures in one line."""
        reward = self._totals.mean_reward
        causes = ", ".join(f"{count} {cause}" for cause, count in self._totals.causes.most_common())
        return " · ".join(
            [
                f"{self._totals.rollouts}/{self._wanted} rollouts",
                f"{self.running} running",
                f"{self.tokens.per_second():,.1f} tokens/s",
                f"mean reward {'-' if reward is None else f'{reward:.3f}'}",
                f"{self._totals.failed} failed{f' ({causes})' if causes else ''}",
                *([self.note] if self.note else []),
            ]
        )

    @contextlib.asynccontextmanager
    async def _live(self) -> AsyncGenerator[None]:
        live = Live(
            get_renderable=self._renderable, console=self.console, refresh_per_second=_FRAMES_PER_SECOND, transient=True
        )
        with live:
            yield

    @contextlib.asynccontextmanager
    async def _lines(self) -> AsyncGenerator[None]:
        printing = asyncio.create_task(self._print_lines())
        try:
            yield
        finally:
            printing.cancel()
            await asyncio.wait({printing})

    async def _print_lines(self) -> None:
        while True:
            self.console.print(Text(self.line()), soft_wrap=True)
            await asyncio.sleep(LINE_SECONDS)

    def _renderable(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        done = self._totals.rollouts
        percent = f"{100 * done / self._wanted:.0f}%" if self._wanted else ""
        bar.add_row(ProgressBar(total=self._wanted, completed=done, width=_BAR_WIDTH), percent)
        return Group(bar, Text(self.line()))
