"""Several processes at one address: `--workers N`.

The parent binds, and starts N workers by exec (gRPC does not survive a fork) that inherit the listening socket; whoever
of them is free accepts. The parent itself serves nothing.

- A worker writes a line to its standard output once it serves. The ready file is written when all do.
- A worker ends gracefully when its standard input ends, so that none outlives the parent, however that ended.
- A worker that ends by itself is replaced, unless it is one of the first and has never served: then all end.
- SIGTERM or SIGINT: no new connections, and the workers end gracefully. A second signal kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from tokentape.held_directory import HeldDirectory
from tokentape_bridge.metrics import DIRECTORY_VARIABLE, forget_worker
from tokentape_bridge.metrics_directory import metrics_directory
from tokentape_bridge.settings import HttpSettings

_logger = logging.getLogger(__name__)

_RESTART_SECONDS = 1.0
_CLOSING_SECONDS = 10.0
"""What a worker gets, beyond the grace period, to close its channels."""


async def serve_with_workers(
    settings: HttpSettings, listener: socket.socket, arguments: Sequence[str], announce: Callable[[], None]
) -> bool:
    """Serve on `listener` until a signal; call `announce` when all workers serve. Return whether all got that far.

    Each worker reads the command line `arguments` again.
    """
    with metrics_directory() as directory:
        workers = _Workers(settings, listener, arguments, directory)
        with workers.signals_caught():
            return await workers.run(announce)


class _Workers:
    def __init__(
        self, settings: HttpSettings, listener: socket.socket, arguments: Sequence[str], directory: HeldDirectory
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._arguments = arguments
        self._directory = directory
        self._stopping = asyncio.Event()
        self._running: set[Process] = set()

    async def run(self, announce: Callable[[], None]) -> bool:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as slots:
            serving = [loop.create_future() for _ in range(self._settings.workers)]
            for first in serving:
                slots.create_task(self._keep_one(first))
            served = all(await asyncio.gather(*serving))
            if served:
                announce()
            else:
                self._stop()
        return served

    @contextlib.contextmanager
    def signals_caught(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        yield
        for number in signals:
            loop.remove_signal_handler(number)

    async def _keep_one(self, first: asyncio.Future[bool]) -> None:
        """Keep one worker running; tell in `first` whether the first one came to serve."""
        while not self._stopping.is_set():
            async with self._started() as process:
                serves = await _said_that_it_serves(process)
                if not first.done():
                    first.set_result(serves or self._stopping.is_set())
                await process.wait()
            if not self._stopping.is_set():
                _logger.error(
                    "worker %d ended with status %s; another takes its place", process.pid, process.returncode
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _RESTART_SECONDS)

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncGenerator[Process]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tokentape_bridge.worker", str(self._listener.fileno()), *self._arguments),
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=(self._listener.fileno(), self._directory.lock),
            env={**os.environ, DIRECTORY_VARIABLE: str(self._directory.path)},
        )
        self._running.add(process)
        try:
            if self._stopping.is_set():
                _tell_to_end(process)
            yield process
        finally:
            self._running.discard(process)
            if process.returncode is None:
                process.kill()
                await process.wait()
            forget_worker(process.pid, str(self._directory.path))

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._kill()
        else:
            self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self._listener.close()
        for process in self._running:
            _tell_to_end(process)
        patience = self._settings.grace_seconds + _CLOSING_SECONDS
        asyncio.get_running_loop().call_later(patience, self._kill)

    def _kill(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _said_that_it_serves(process: Process) -> bool:
    assert process.stdout is not None
    return await process.stdout.readline() != b""


def _tell_to_end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
