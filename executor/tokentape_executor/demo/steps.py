"""Progress of steps that take their time: a spinner with a clock on a terminal, lines of text anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_HEARTBEAT_SECONDS = 10.0
"""How often a step that goes on says so where there is no spinner."""


class Steps:
    """Tells people on `console` which step is going on, and how long each one took."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def step(self, doing: str, done: str) -> Generator[None]:
        """Show `doing` while the body runs, then `done` with a tick; after an exception `doing` with a cross."""
        started = time.monotonic()
        try:
            with self._spinner(doing) if self._console.is_terminal else self._heartbeat(doing):
                yield
        except BaseException:
            self._finish("✗", "bold red", doing, started)
            raise
        self._finish("✓", "bold green", done, started)

    def _finish(self, mark: str, style: str, text: str, started: float) -> None:
        seconds = time.monotonic() - started
        self._console.print(Text.assemble((f" {mark} ", style), text, (f"  {seconds:.1f} s", "dim")))

    @contextmanager
    def _spinner(self, doing: str) -> Generator[None]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(doing, total=None)
            yield

    @contextmanager
    def _heartbeat(self, doing: str) -> Generator[None]:
        ended = threading.Event()
        started = time.monotonic()

        def beat() -> None:
            while not ended.wait(_HEARTBEAT_SECONDS):
                self._console.print(f"   … {doing}, {time.monotonic() - started:.0f} s", markup=False, highlight=False)

        self._console.print(f"   … {doing}", markup=False, highlight=False)
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
