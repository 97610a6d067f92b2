"""Servers under load: started, waited for, their CPU time read, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_STOP_SECONDS = 20.0
_LOG_TAIL_CHARACTERS = 3000


class ServerFailed(Exception):
    """A server did not start; the message has the end of its log."""


@dataclass
class Server:
    """A process, and those that it started, serving at `address`."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far, but for those of an engine's core: the front end's."""
        return self._cpu_seconds(of_core=False)

    def core_cpu_seconds(self) -> float:
        """CPU time so far of those of its processes that are an engine's core."""
        return self._cpu_seconds(of_core=True)

    def _cpu_seconds(self, *, of_core: bool) -> float:
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            for process in (main, *main.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if _is_engine_core(process) is of_core:
                        total += _cpu_seconds(process.pid)
        return total

    def memory_bytes(self) -> int:
        """Resident memory of its main process."""
        return psutil.Process(self.process.pid).memory_info().rss


def _cpu_seconds(pid: int) -> float:
    """Return a process's CPU time to the nanosecond, where /proc counts it in hundredths of a second."""
    # Linux makes the clock of a process's CPU time from its id (clock_getcpuclockid(3)).
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        raise psutil.NoSuchProcess(pid) from None


def _is_engine_core(process: psutil.Process) -> bool:
    said = " ".join([process.name(), *process.cmdline()])
    return "EngineCore" in said or "VLLM::Worker" in said


def end_by_signals() -> None:
    """Let SIGTERM end this process by an exception, so that the servers that it has started end too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def console(name: str) -> list[str]:
    """Return the command that runs one of tokentape's."""
    return [sys.executable, "-P", "-c", f"from tokentape.console import {name}; {name}()"]


@contextmanager
def serving(
    name: str,
    command: Sequence[str],
    *,
    logs: Path,
    environment: Mapping[str, str] | None = None,
    ready_file: Path | None = None,
    health_path: str = "",
    health_url: str = "",
    listens: str = "",
    start_seconds: float = 240.0,
) -> Generator[Server]:
    """Run a server until the block ends. It is ready when one of these says so.

    That is: `ready_file` is written (and `health_path` of the address in it answers 200, if given), `health_url`
    answers 200, or `listens` (HOST:PORT) takes connections.

    Raises `ServerFailed`.
    """
    with _running(name, command, logs, environment) as (process, log):
        give_up = time.monotonic() + start_seconds
        while not (address := _ready_address(ready_file, health_path, health_url, listens)):
            if process.poll() is not None or time.monotonic() > give_up:
                raise ServerFailed(f"{name} did not become ready:\n{tail(log)}")
            time.sleep(0.1)
        yield Server(address, process, log)


@contextmanager
def sidecar_by(
    launcher: Sequence[str],
    *,
    name: str,
    model: Path,
    out: Path,
    engine: Sequence[str],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Generator[Server]:
    """Run the sidecar `main` of a model named `bench`: `launcher` runs it, and its engine has the options `engine`."""
    ready = out / f"{name}.ready"
    ready.unlink(missing_ok=True)
    command = [
        *(*launcher, "--model", str(model), "--served-model-name", "bench", "--name", "main"),
        *("--listen", "127.0.0.1:0", "--ready-file", str(ready), "--grace-seconds", "1", *options, "--", *engine),
    ]
    with serving(name, command, logs=out / "logs", environment=environment, ready_file=ready) as server:
        yield server


@contextmanager
def bridge_to(sidecar: str, *, name: str, out: Path, options: Sequence[str] = ()) -> Generator[Server]:
    """Run a `tokentape-bridge` in front of the sidecar `main` at `sidecar`; it knows the sidecar when it is ready."""
    ready = out / f"{name}.ready"
    ready.unlink(missing_ok=True)
    command = [
        *console("bridge"),
        *("--sidecar", f"main={sidecar}", "--listen", "127.0.0.1:0", "--ready-file", str(ready), *options),
    ]
    with serving(name, command, logs=out / "logs", ready_file=ready, health_path="/health") as server:
        yield server


@contextmanager
def _running(
    name: str, command: Sequence[str], logs: Path, environment: Mapping[str, str] | None
) -> Generator[tuple[subprocess.Popen[bytes], Path]]:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        _stop(process)


def _ready_address(ready_file: Path | None, health_path: str, health_url: str, listens: str) -> str:
    if ready_file is not None:
        address = str(json.loads(ready_file.read_text())["address"]) if ready_file.exists() else ""
        return address if address and (not health_path or _answers(f"http://{address}{health_path}")) else ""
    if health_url:
        return health_url.split("/")[2] if _answers(health_url) else ""
    return listens if _connects(listens) else ""


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
        return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    # What the server started and left behind goes too.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
