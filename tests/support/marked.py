"""Processes by a mark in their environment: those that a test has started, whoever their parents are by now."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psutil
import pytest

_NAME = "TOKENTAPE_TEST_MARK"


class Marked:
    """All processes but this one that have inherited the mark."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those that run now and have one of these words (none: any) in their command line."""
        return [each for each in psutil.process_iter() if self._is_one(each, words)]

    def _is_one(self, process: psutil.Process, words: tuple[str, ...]) -> bool:
        try:
            if process == psutil.Process() or process.environ().get(_NAME) != self._mark:
                return False
            line = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        return bool(line) and (not words or any(word in line for word in words))


@pytest.fixture(scope="module")
def marked() -> Iterator[Marked]:
    """Mark what is started from now on."""
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_NAME, mark)
        yield Marked(mark)
