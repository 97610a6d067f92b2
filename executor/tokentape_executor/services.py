"""What an executor has running outside its own process, and the files that go with it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tokentape_executor.errors import StartFailed


class Stoppable(Protocol):
    """Something that runs until it is stopped."""

    def stop(self) -> None:
        """Stop it; blocks until it has ended. Stopping again does nothing."""
        ...


class ServiceGroup:
    """Processes and a temporary directory that end together."""

    def __init__(self, log_directory: Path | None) -> None:
        """Send logs to `log_directory`, where they stay; `None`: to the temporary directory."""
        self.directory = Path(tempfile.mkdtemp(prefix="tokentape-"))
        """For the group's files; it goes with the group."""
        self._log_directory = log_directory or self.directory / "logs"
        self._stops: list[Callable[[], None]] = []
        self._stopped = False
        self._lock = threading.Lock()

    def log_file(self, name: str) -> Path:
        """Return where the log of the process `name` goes."""
        return self._log_directory / f"{name}.log"

    def add(self, member: Stoppable) -> None:
        """Make `member` end with the group; see `add_stop`."""
        self.add_stop(member.stop)

    def add_stop(self, stop: Callable[[], None]) -> None:
        """Have the group call `stop` when it stops. Where it has already, calls it now and raises `StartFailed`."""
        with self._lock:
            if not self._stopped:
                self._stops.append(stop)
                return
        stop()
        raise StartFailed("it was shut down while it started")

    def stop(self) -> None:
        """Stop all members, at the same time, and remove the directory. From any thread; again does nothing."""
        with self._lock:
            self._stopped = True
            stops, self._stops = self._stops, []
            threads = [threading.Thread(target=stop) for stop in stops]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            shutil.rmtree(self.directory, ignore_errors=True)
