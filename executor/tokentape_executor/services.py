"""What an executor has running outside its own process, and the files that go with it."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import httpx

from tokentape_executor.errors import StartFailed
from tokentape_executor.processes import ChildProcess
from tokentape_executor.settings import ExecutorSettings


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
        self._members: list[Stoppable] = []
        self._stopped = False
        self._lock = threading.Lock()

    def log_file(self, name: str) -> Path:
        """Return where the log of the process `name` goes."""
        return self._log_directory / f"{name}.log"

    def add(self, member: Stoppable) -> None:
        """Make `member` end with the group. Where that was stopped already, stops `member` and raises `StartFailed`."""
        with self._lock:
            if not self._stopped:
                self._members.append(member)
                return
        member.stop()
        raise StartFailed("it was shut down while it started")

    def stop(self) -> None:
        """Stop all members, at the same time, and remove the directory. From any thread; again does nothing."""
        with self._lock:
            self._stopped = True
            members, self._members = self._members, []
            threads = [threading.Thread(target=member.stop) for member in members]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            shutil.rmtree(self.directory, ignore_errors=True)


class Bridge:
    """A bridge process."""

    def __init__(self, process: ChildProcess, ready_file: Path, timeout_seconds: float) -> None:
        """Use `launch`."""
        self._process = process
        self._ready_file = ready_file
        self._timeout_seconds = timeout_seconds

    @classmethod
    def launch(
        cls,
        sidecars: Mapping[str, str],
        group: ServiceGroup,
        settings: ExecutorSettings,
        *,
        options: Sequence[str] = (),
    ) -> Self:
        """Start the process in front of `sidecars` (name to gRPC address), a member of `group`; return at once.

        `options` are more of `tokentape-bridge --help`.
        """
        ready_file = group.directory / "bridge.ready"
        process = ChildProcess.start(
            "bridge",
            [
                *(sys.executable, "-P", "-c", "from tokentape.console import bridge; bridge()"),
                *(f"--sidecar={name}={address}" for name, address in sidecars.items()),
                *("--listen", "127.0.0.1:0", "--ready-file", str(ready_file)),
                *options,
            ],
            log_file=group.log_file("bridge"),
        )
        group.add(process)
        return cls(process, ready_file, settings.start_timeout_seconds)

    async def wait_ready(self) -> str:
        """Return the OpenAI base URL (`http://HOST:PORT/v1`) once the bridge, and a sidecar behind it, serve.

        Raises `StartFailed`.
        """
        address = await self._process.wait_for_ready_file(self._ready_file, timeout_seconds=self._timeout_seconds)
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:

            async def healthy() -> bool | None:
                try:
                    return True if (await http.get(f"http://{address}/health")).is_success else None
                except httpx.TransportError:
                    return None

            await self._process.wait_for(healthy, what="good health", timeout_seconds=self._timeout_seconds)
        return f"http://{address}/v1"
