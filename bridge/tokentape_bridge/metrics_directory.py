"""The directory in which the workers of one bridge share their metrics."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager

from tokentape.held_directory import HeldDirectory

PREFIX = "tokentape-bridge-metrics-"


@contextmanager
def metrics_directory() -> Generator[HeldDirectory]:
    """Make the directory; on leaving, remove it. A bridge and its workers hold it as long as one of them lives."""
    directory = HeldDirectory.make(PREFIX, tempfile.gettempdir())
    try:
        yield directory
    finally:
        directory.remove()
