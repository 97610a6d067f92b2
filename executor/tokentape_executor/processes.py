"""Child processes of the executor: the bridge, and NeMo Gym with everything that it starts.

Each runs in a session of its own under `_leash.py`, with its output in a log file. Rules:

1. `stop` leaves no process behind that the command has started, whatever sessions or process groups those made, also
   where the leash itself was killed: all that it has started has a mark in its environment.
2. Nothing is left behind either when this process dies without calling `stop`.
3. A command that dies, or is not ready in time, raises `StartFailed` with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import psutil

from tokentape_executor import _leash
from tokentape_executor.errors import StartFailed

_T = TypeVar("_T")

_PROBE_INTERVAL_SECONDS = 0.1
_LOG_TAIL_BYTES = 4096
_FORCE_SECONDS = 1.5
_KILL_SECONDS = 1.0
_MARK = "TOKENTAPE_LEASH"
"""The variable that all have that one leash has started, with a value of its own."""


class ChildProcess:
    """One command, running. Its methods may be called from any thread."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log_file: Path, grace_seconds: float, mark: str
    ) -> None:
        """Use `start`."""
        self._mark = mark
        self.name = name
        self.log_file = log_file
        self._process = process
        self._grace_seconds = grace_seconds
        self._stopping = threading.Lock()

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        scratch: Path | None = None,
        grace_seconds: float = 1.5,
    ) -> Self:
        """Start `command`; return at once.

        `name` is for messages. `environment` replaces this process's (`None`: inherited), `directory` is the working
        directory, `scratch` a directory that is removed when all has ended, `grace_seconds` the time between SIGTERM
        and SIGKILL. Raises `StartFailed` where the program cannot be executed.
        """
        mark = secrets.token_hex(16)
        leash = [sys.executable, "-P", _leash.__file__, str(os.getpid()), str(grace_seconds), str(scratch or "")]
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            try:
                process = subprocess.Popen(
                    [*leash, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**(os.environ if environment is None else environment), _MARK: mark},
                    cwd=directory,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartFailed(f"{name} could not be started: {error}") from error
        return cls(name, process, log_file, grace_seconds, mark)

    @property
    def running(self) -> bool:
        """Whether the command runs."""
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The command's exit status: 128 + n where signal n ended it; `None` while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """Return the end of the log, at most 4 KiB."""
        with self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def log_end(self) -> str:
        """Return where the log is and how it ends, as a part of a message."""
        return f"its log, {self.log_file}, ends with:\n{self.log_tail()}"

    async def wait_for(self, probe: Callable[[], Awaitable[_T | None]], *, what: str, timeout_seconds: float) -> _T:
        """Return the first result of `probe` that is not `None`; it is asked every tenth of a second.

        Raises `StartFailed`, with the log's end, when the command ends or `timeout_seconds` pass before that; `what`
        says in that message what was waited for.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            # Asked before the probe: a command that published its readiness and died has failed.
            running = self.running
            result = await probe()
            if result is not None and running:
                return result
            if not running:
                raise self._failed(f"ended with status {self._process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready after {timeout_seconds:g} s: no {what}")
            await asyncio.sleep(_PROBE_INTERVAL_SECONDS)

    async def wait_for_ready_file(self, path: Path, *, timeout_seconds: float) -> str:
        """Return the address in the ready file `path` (see `tokentape.process`) as soon as it exists.

        Raises `StartFailed` as `wait_for` does.
        """

        async def read() -> str | None:
            return _address_in(path)

        return await self.wait_for(read, what="its ready file", timeout_seconds=timeout_seconds)

    def stop(self) -> None:
        """End the command and all that it started: SIGTERM, then SIGKILL after the grace period. Again: nothing.

        Blocks until all have ended: at most for the grace period and a moment.
        """
        with self._stopping:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(self._grace_seconds + _FORCE_SECONDS)
                except subprocess.TimeoutExpired:
                    # Something below cannot be killed: it hangs in the kernel.
                    self._process.kill()
                    self._process.wait()
            if self._process.returncode < 0:
                _kill_marked(self._mark)

    def _failed(self, problem: str) -> StartFailed:
        return StartFailed(f"{self.name} {problem}; {self.log_end()}")


def _kill_marked(mark: str) -> None:
    """Kill what a leash that was killed has left behind; return when it has ended, or after a moment."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := [each for each in psutil.process_iter() if _has_mark(each, mark)]) and time.monotonic() < deadline:
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except (psutil.Error, OSError):
        return False  # it has ended, or is another user's


def _address_in(ready_file: Path) -> str | None:
    """Return the address that a process published; `None` while it has not."""
    return str(json.loads(ready_file.read_text())["address"]) if ready_file.exists() else None
