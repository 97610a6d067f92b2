"""The node's bridge: one process, always at the same address."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from tokentape_executor.node.places import Place
from tokentape_executor.node.ports import Address
from tokentape_executor.node.supervised import HEALTH_SECONDS, Service, stop
from tokentape_executor.processes import ChildProcess


@dataclass(frozen=True, slots=True)
class BridgePlan:
    """How the bridge is started."""

    place: Place
    address: Address
    """Where it listens; reserved."""
    options: Sequence[str]
    log_file: Path
    timeout_seconds: float

    @property
    def url(self) -> str:
        """The OpenAI base URL."""
        return f"http://{self.address}/v1"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Service[str]]:
        """Start the bridge and wait until it answers; stop it on leaving. Raises `StartFailed`."""
        ready_file = self.place.directory / "bridge.ready"
        ready_file.unlink(missing_ok=True)
        # What one that was killed has left there would else pile up for as long as the node is there.
        shutil.rmtree(self.place.temporary, ignore_errors=True)
        self.place.temporary.mkdir(exist_ok=True)
        process = ChildProcess.start(
            "bridge",
            [
                *(sys.executable, "-P", "-c", "from tokentape.console import bridge; bridge()"),
                *("--sidecar-file", str(self.place.sidecars)),
                *("--listen", str(self.address), "--ready-file", str(ready_file)),
                *self.options,
            ],
            log_file=self.log_file,
            # Where it unpacks tokenizers, and its workers count.
            environment={**os.environ, "TMPDIR": str(self.place.temporary)},
        )
        try:
            await process.wait_for_ready_file(ready_file, timeout_seconds=self.timeout_seconds)
            async with httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False) as http:

                async def check() -> None:
                    (await http.get(f"http://{self.address}/version")).raise_for_status()

                yield Service(self.url, check, process)
        finally:
            await stop(process)


async def sidecar_states(http: httpx.AsyncClient, address: Address) -> tuple[Mapping[str, str], str]:
    """Return the state of each sidecar that the bridge knows, or none and why. Raises `httpx.HTTPError`.

    The state of one that serves is "SERVING".
    """
    answer = await http.get(f"http://{address}/health")
    body = cast("dict[str, Any]", answer.json())
    if answer.is_success:
        return cast("dict[str, str]", body["sidecars"]), ""
    return {}, str(body["error"]["message"])
