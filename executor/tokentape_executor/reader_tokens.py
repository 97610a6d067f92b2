"""Reader tokens in a file, for whoever wants to look at tapes while they are recorded.

One line a tape, in the order in which they were opened: `TAPE_ID READER_TOKEN ADDRESS`, the address being the sidecar's
and optional. The file is its owner's alone (mode 0600): whoever reads it can read, seal and delete those tapes.
Lines are only added; a tape that is sealed stays readable until its sidecar forgets it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tokentape_executor.errors import ExecutorError
from tokentape_executor.tape_client import OpenedTape

STANDARD_INPUT = Path("-")
"""Instead of a file."""

_FIELDS_WITHOUT_ADDRESS, _FIELDS = 2, 3


class ReaderTokensError(ExecutorError):
    """A file of reader tokens cannot be used; the message names file and line, never a token."""


@dataclass(frozen=True, slots=True)
class ReadableTape:
    """A line of the file."""

    tape: OpenedTape = field(repr=False)
    address: str | None
    """Of its sidecar, `HOST:PORT` or `unix:/PATH`."""


class ReaderTokenFile:
    """A file that reader tokens are written to, a line as soon as a tape is open."""

    def __init__(self, path: Path) -> None:
        """Begin it anew. Raises `ReaderTokensError`."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            # Made with its mode: there is no moment at which others can read it.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise self._error(error) from None

    def add(self, tape: OpenedTape, address: str) -> None:
        """Write the tape's line. Raises `ReaderTokensError`."""
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.write(f"{tape.tape_id} {tape.reader_token} {address}\n")
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> ReaderTokensError:
        return ReaderTokensError(f"reader tokens: cannot write to {self._path}: {error.strerror}")


def read_reader_tokens(path: Path) -> list[ReadableTape]:
    """Return the tapes of a file, or of standard input, in order. Raises `ReaderTokensError`.

    A last line that is still being written is left out.
    """
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ReaderTokensError(f"cannot read {path}: {problem}") from None
    lines = text.splitlines(keepends=True)
    if path != STANDARD_INPUT and lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _read(line: str, place: str) -> ReadableTape:
    words = line.split()
    if len(words) not in {_FIELDS_WITHOUT_ADDRESS, _FIELDS}:
        raise ReaderTokensError(f"{place}: not `TAPE_ID READER_TOKEN [ADDRESS]`")
    return ReadableTape(OpenedTape(words[0], words[1]), words[2] if len(words) == _FIELDS else None)
