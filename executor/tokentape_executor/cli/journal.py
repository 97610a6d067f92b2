"""The file of results: it is also the journal by which an interrupted run continues.

Invariants, whenever the process ends and however it does:

1. Each pair of prompt and sample has one row at most.
2. A row that was appended is on the disk (fsync), whole; a line that was torn by a kill is cut off by the next run.
3. One process at a time has the file; another is refused.
4. The file is only ever appended to, or replaced as a whole: when failed rows are taken out to be run again, and when
   the last pair is there and the rows are put into the prompts' order.

A row belongs to its prompt by the prompt's index and its whole text, and has the terms on which it was made, so that a
file made from other prompts, or on other terms, is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias, cast

from tokentape_executor.cli.prompts import Prompt
from tokentape_executor.cli.row import COMPLETED, Json, to_line
from tokentape_executor.cli.terms import Terms, differences
from tokentape_executor.errors import ExecutorError

_ROW_BEGINS = b'{"prompt_index":'
"""As `row.result_row` orders the keys."""


_KINDS = {
    "prompt_index": int,
    "sample_index": int,
    "task": str,
    "terms": str,
    "status": str,
    "receipt": dict,
}
"""What is read of rows that are there."""


class JournalError(ExecutorError):
    """The file of results cannot be used: its owner, its content or its disk is in the way."""


class Pair(NamedTuple):
    """One rollout of one prompt."""

    prompt_index: int
    sample_index: int


class _Line(NamedTuple):
    """Where a row is in the file, in bytes."""

    start: int
    length: int


Keep: TypeAlias = Callable[[Json], bool]
"""Whether a row that is there stays."""


class Journal:
    """The open file. Use `open`, and `close` it in the end."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        """`file` is open to be read and appended to, and locked."""
        self.path = path
        self._file = file
        self._lines: dict[Pair, _Line] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        prompts: Sequence[Prompt],
        terms: Terms,
        *,
        retry_failed: bool,
        seen: Callable[[Json], object],
    ) -> Self:
        """Open or make the file at `path`, with its directory, as far as an earlier run of `prompts` has got.

        A torn last line is cut off; with `retry_failed`, rows that are not of status completed are taken out. `seen` is
        called with each row that is there. Raises `JournalError` where another process has the file, or it is not one
        of these prompts' results on these terms.
        """
        path = path.resolve()  # a link must not be replaced by what it stands for
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, _locked(path))
        try:
            journal._recover(prompts, terms, _completed if retry_failed else _always, seen)
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def pairs(self) -> frozenset[Pair]:
        """The rollouts that the file has."""
        return frozenset(self._lines)

    def append(self, row: Json) -> None:
        """Add a row, and return when it is on the disk. Raises `JournalError`, with nothing added, where that fails."""
        line = to_line(row)
        end = self._file.seek(0, os.SEEK_END)
        try:
            _write(self._file, line)
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise JournalError(f"cannot write to {self.path}: {error.strerror}") from None
        self._lines[_pair(row)] = _Line(end, len(line))

    def sort(self) -> None:
        """Put the rows into the order of prompts and samples. Raises `JournalError`, with nothing changed."""
        ordered = sorted(self._lines)
        if ordered != list(self._lines):
            self._replace(ordered)

    def close(self) -> None:
        """Close the file and let others have it."""
        self._file.close()

    def _recover(self, prompts: Sequence[Prompt], terms: Terms, keep: Keep, seen: Callable[[Json], object]) -> None:
        dropped = False
        for number, (line, content) in enumerate(self._read(), 1):
            place = f"{self.path}:{number}"
            row = _parse(content, place)
            pair = _check(row, prompts, place)
            if pair in self._lines:
                raise JournalError(f"{place}: prompt {pair.prompt_index}, sample {pair.sample_index} is there twice")
            if keep(row):
                _check_terms(row, terms, place)
                self._lines[pair] = line
                seen(row)
            else:
                dropped = True
        if dropped:
            self._replace(list(self._lines))

    def _read(self) -> Iterator[tuple[_Line, bytes]]:
        """Yield the whole lines; then cut off what is left of a last one whose write was torn."""
        self._file.seek(0)
        start = 0
        # Another file object on the same description, for its buffer; closing it leaves ours open.
        with os.fdopen(os.dup(self._file.fileno()), "rb") as reader:
            for content in reader:
                if not content.endswith(b"\n"):
                    _check_torn(content, self.path)
                    break
                yield _Line(start, len(content)), content
                start += len(content)
        self._file.truncate(start)

    def _replace(self, pairs: Iterable[Pair]) -> None:
        """Put a file with the rows of `pairs`, in this order, in the place of this one, and go on with that."""
        draft = _draft(self.path)
        draft.unlink(missing_ok=True)  # of a run that was killed here
        lines: dict[Pair, _Line] = {}
        try:
            file = _open(draft)
            # Locked before it has the name by which others come.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for pair in pairs:
                start, length = self._lines[pair]
                lines[pair] = _Line(file.tell(), length)
                _write(file, os.pread(self._file.fileno(), length, start))
            os.fsync(file.fileno())
            draft.replace(self.path)
            _sync_directory(self.path.parent)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise JournalError(f"cannot rewrite {self.path}: {error.strerror}") from None
        self._file.close()
        self._file, self._lines = file, lines


def cut_torn_line(path: Path) -> None:
    """Cut off what a kill has left behind the last whole line of a file; where there is no file, do nothing."""
    if path.exists():
        with path.open("r+b") as file:
            end = 0
            for line in file:
                end += len(line) if line.endswith(b"\n") else 0
            file.truncate(end)


def _draft(path: Path) -> Path:
    """Return where a replacement is written: beside the file, so that it can take its place at once."""
    return path.with_name(f".{path.name}.draft")


def _open(path: Path) -> io.FileIO:
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666), "r+b")


def _locked(path: Path) -> io.FileIO:
    """Open the file and take its lock. The lock is the file's own: it ends with the process, and leaves nothing."""
    while True:
        try:
            file = _open(path)
        except OSError as error:
            raise JournalError(f"cannot write to {path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise JournalError(f"{path}: another tokentape-rollout is writing to it; wait for it, or stop it") from None
        # Whoever had it may have replaced it between our opening it and our lock.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()


def _write(file: io.FileIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) or 0 :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _always(_: Json) -> bool:
    return True


def _completed(row: Json) -> bool:
    return row["status"] == COMPLETED


def _parse(line: bytes, place: str) -> Json:
    try:
        row: object = json.loads(line)
    except ValueError as error:
        raise JournalError(f"{place}: not JSON: {error}; give another -o") from None
    fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    for name, kind in _KINDS.items():
        if not isinstance(fields.get(name), kind):
            raise JournalError(f"{place}: no result of tokentape-rollout: {name} is missing or wrong; give another -o")
    return fields


def _check_torn(content: bytes, path: Path) -> None:
    """Raise `JournalError` where a last line without its end is not the beginning of a row: somebody else's file."""
    if not (content.startswith(_ROW_BEGINS) or _ROW_BEGINS.startswith(content)):
        raise JournalError(f"{path}: no result of tokentape-rollout: it ends with {content[-60:]!r}; give another -o")


def _pair(row: Json) -> Pair:
    return Pair(row["prompt_index"], row["sample_index"])


def _check(row: Json, prompts: Sequence[Prompt], place: str) -> Pair:
    """Return which rollout a row is. Raises `JournalError` where it is none of these prompts."""
    pair = _pair(row)
    if not 0 <= pair.prompt_index < len(prompts):
        raise JournalError(
            f"{place}: made from other prompts: it is of prompt {pair.prompt_index}, and there are {len(prompts)}, "
            "counted from 0; give the same prompts, or another -o"
        )
    if row["task"] != prompts[pair.prompt_index].text:
        raise JournalError(
            f"{place}: made from other prompts: its task is {row['task']!r:.80}, but prompt {pair.prompt_index} is "
            f"{prompts[pair.prompt_index].text!r:.80}; give the same prompts, or another -o"
        )
    return pair


def _check_terms(row: Json, terms: Terms, place: str) -> None:
    """Raise `JournalError` where a row was made on other terms."""
    try:
        before: object = json.loads(row["terms"])
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise JournalError(f"{place}: no result of tokentape-rollout: terms is no JSON object; give another -o")
    if told := differences(cast("dict[str, Any]", before), terms):
        raise JournalError(f"{place}: made with other options: {told}; give the same options, or another -o")
