"""A sidecar of the run's own: a child process that is started again, at the same place, when it or its engine dies."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from tokentape_executor.cli.sidecar import Health, Sidecar
from tokentape_executor.errors import StartFailed
from tokentape_executor.private_socket import PrivateSocket
from tokentape_executor.processes import ChildProcess
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import ExecutorSettings

_LOOK_SECONDS = 0.2
_PAUSE_SECONDS = 1.0


class OwnSidecar:
    """The process, whichever it is by now."""

    def __init__(self, options: Sequence[str], group: ServiceGroup, settings: ExecutorSettings) -> None:
        """Start nothing yet. `options` are those of `tokentape-sidecar` that say what it serves, its engine's included.

        `group` is what the process will end with.
        """
        self._options = options
        self._group = group
        self._settings = settings
        self._name = f"rollout-{secrets.token_hex(4)}"
        self._socket = PrivateSocket()
        self.address = str(self._socket.address)
        """Where it serves: a Unix socket that only this user can reach."""
        self._ready_file = group.directory / "sidecar.ready"
        self._process: ChildProcess | None = None
        self.problem = ""
        """Why it could not be started again the last time; empty: it could."""

    async def start(self) -> None:
        """Start it and return once it serves. Raises `StartFailed`."""
        self._ready_file.unlink(missing_ok=True)
        self._process = process = ChildProcess.start(
            "the sidecar", self._command(), log_file=self._group.log_file("sidecar")
        )
        await asyncio.to_thread(self._group.add, process)
        await process.wait_for_ready_file(self._ready_file, timeout_seconds=self._settings.start_timeout_seconds)

    async def keep_running(self, sidecar: Sidecar) -> None:
        """Start it again whenever it has died or, as `sidecar` says of it, its engine has; until cancelled."""
        while True:
            process = self._process
            assert process is not None, "start comes first"
            while process.running and sidecar.health is not Health.NOT_SERVING:  # noqa: ASYNC110 - a process
                await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(process.stop)
            try:
                await self.start()
                self.problem = ""
            except StartFailed as error:
                self.problem = str(error)
                await asyncio.sleep(_PAUSE_SECONDS)
            # What was said of the engine before is of the one that has gone.
            while sidecar.health is Health.NOT_SERVING:  # noqa: ASYNC110 - as above
                await asyncio.sleep(_LOOK_SECONDS)

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-P", "-c", "from tokentape.console import sidecar; sidecar()"),
            *("--name", self._name, "--grace-seconds", "0"),
            *("--listen", self.address, "--ready-file", str(self._ready_file)),
            *self._options,
        ]


def serving(model: str, vllm_options: Sequence[str]) -> list[str]:
    """Return the options of a sidecar that serves `model`, a directory or a name that vLLM can load."""
    return ["--model", model, "--served-model-name", Path(model).resolve().name, "--", *vllm_options]
