"""Real processes for the integration tests: scripted sidecars and bridges, each on a port of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from support.rig import open_agent, start_rig
from support.tokenizers import tokenizer_directory

__all__ = ["open_agent", "start_rig", "tokenizer_directory"]

START_SECONDS = 90


class ServerProcess:
    """A server of ours, started by its console script and stopped by SIGTERM, after which it must exit with 0."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._ready_file = directory / f"{command[0]}.ready.json"
        self._ready_file.unlink(missing_ok=True)
        self.log_file = directory / f"{command[0]}.log"
        program = str(Path(sys.executable).with_name(command[0]))
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [program, *command[1:], "--ready-file", str(self._ready_file)], stderr=log, stdout=log
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def address(self) -> str:
        """Where it serves, once it does."""
        deadline = time.monotonic() + START_SECONDS
        while not self._ready_file.exists():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready:\n{self.log}"
            time.sleep(0.02)
        ready = json.loads(self._ready_file.read_text())
        assert ready["pid"] == self.process.pid
        return ready["address"]

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                status = self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            assert status == 0, self.log


class Bridge(ServerProcess):
    """A bridge, and an HTTP client to it."""

    def __init__(self, command: list[str], directory: Path) -> None:
        super().__init__(command, directory)
        try:
            self.client = httpx.Client(base_url=f"http://{self.address}", timeout=20)
        except BaseException:
            # Nobody else would: it is no context yet.
            self.kill()
            raise

    def __exit__(self, *details: object) -> None:
        self.client.close()
        super().__exit__(*details)

    def wait_healthy(self) -> Self:
        """Return when it and a sidecar of it serve."""
        deadline = time.monotonic() + START_SECONDS
        while self.client.get("/health").status_code != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return self

    def chat(self, content: str = "What is 2+3?", **fields: Any) -> httpx.Response:
        """Ask for a chat completion; `fields` are the rest of the body, `messages` in them replaces `content`."""
        return self.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields}
        )


StartSidecar = Callable[..., ServerProcess]
StartBridge = Callable[..., Bridge]


def scripted_sidecar_command(
    directory: Path, tokenizer: Path, script: Mapping[str, Any], name: str, listen: str
) -> list[str]:
    script_file = directory / "script.json"
    script_file.write_text(json.dumps(script))
    command = ["tokentape-sidecar", "--engine", "scripted", "--script", str(script_file)]
    return [*command, "--tokenizer", str(tokenizer), "--name", name, "--listen", listen]


@pytest.fixture(scope="module")
def start_sidecar(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[StartSidecar]:
    """Start a sidecar that replays `script`: `start_sidecar(script, name="a", listen=..., tokenizer=...)`."""
    with ExitStack() as servers:

        def start(
            script: Mapping[str, Any],
            *,
            name: str = "a",
            listen: str = "127.0.0.1:0",
            tokenizer: Path = model_directory,
        ) -> ServerProcess:
            directory = tmp_path_factory.mktemp("sidecar")
            command = scripted_sidecar_command(directory, tokenizer, script, name, listen)
            return servers.enter_context(ServerProcess(command, directory))

        yield start


@pytest.fixture(scope="module")
def start_bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartBridge]:
    """Start a bridge in front of sidecars, given by name: `start_bridge("--option", a="127.0.0.1:50051")`."""
    with ExitStack() as servers:

        def start(*options: str, listen: str = "127.0.0.1:0", **sidecars: str) -> Bridge:
            command = ["tokentape-bridge", "--listen", listen, *options]
            for name, address in sidecars.items():
                command += ["--sidecar", f"{name}={address}"]
            return servers.enter_context(Bridge(command, tmp_path_factory.mktemp("bridge")))

        yield start
