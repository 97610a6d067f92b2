"""NeMo Gym as a child of the keeper: its servers, its Ray.

Gym wants another Python than the engine, so it runs from its own virtual environment and is spoken to by HTTP. What it
starts (about 27 processes, most of them Ray's) lives in one session with a private HOME and temporary directory, and
goes with it; see `processes.py`. Its servers listen on 127.0.0.1 only; Ray's own ports ask for a token that only this
Ray's processes know. A Ray that this process belongs to is neither used nor seen.

Nothing is installed at start: each server's `.venv` is a link to Gym's own environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tokentape_executor.errors import StartFailed
from tokentape_executor.node.gym_head import GymHead
from tokentape_executor.node.ports import Address, reserved
from tokentape_executor.node.spec import GymSpec
from tokentape_executor.node.supervised import HEALTH_SECONDS, Service, Unwell, stop
from tokentape_executor.processes import ChildProcess

_HOST = "127.0.0.1"
_OLDEST_VERSION = (0, 4)
_CHECK_SECONDS = 60.0
_LONGEST_TEMPORARY_ROOT = 22
"""Ray's Unix sockets lie 85 characters below it, and their paths may have 107."""
_FOREIGN_VARIABLES = ("RAY_", "PYTHON", "VIRTUAL_ENV")
"""Prefixes of variables that are about the trainer's Ray and Python, and would mislead Gym's."""
_PORT_TAKEN = "address already in use"
_PORT_ATTEMPTS = 4
"""Gym looks for free ports and binds them later, so that another process may take one between."""


class _PortTaken(Exception):
    """One of the ports that Gym had chosen was taken."""


@dataclass(frozen=True, slots=True)
class GymPlan:
    """How Gym is started."""

    spec: GymSpec
    policy_base_url: str
    """The OpenAI base URL (with `/v1`) that its model server calls."""
    log_file: Path
    timeout_seconds: float

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Service[Mapping[str, str]]]:
        """Start Gym and wait until all its servers answer; stop it on leaving. It offers its agents' base URLs.

        Raises `StartFailed`, also where the environment has no nemo-gym of 0.4 or newer.
        """
        await check_installation(self.spec.venv)
        async with contextlib.AsyncExitStack() as stack:
            service = await self._started(stack)
            yield service

    async def _started(self, stack: contextlib.AsyncExitStack) -> Service[Mapping[str, str]]:
        """Return the running Gym; `stack` stops it."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            async with contextlib.AsyncExitStack() as this_start:
                try:
                    service = await self._start_once(this_start)
                except _PortTaken as taken:
                    if attempt == _PORT_ATTEMPTS:
                        raise StartFailed(str(taken)) from None
                else:
                    await stack.enter_async_context(this_start.pop_all())
                    return service
        raise AssertionError("the last attempt returns or raises")

    async def _start_once(self, stack: contextlib.AsyncExitStack) -> Service[Mapping[str, str]]:
        address = stack.enter_context(reserved(_HOST))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False))
        scratch = _make_scratch(self.spec.venv)
        # Its leash removes it, unless that had to be killed because Gym took too long to end.
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        process = ChildProcess.start(
            "NeMo Gym",
            _command(self.spec, scratch, address, self.policy_base_url),
            log_file=self.log_file,
            environment=_environment(os.environ, self.spec.venv, scratch),
            directory=scratch / "w",
            scratch=scratch,
        )
        stack.push_async_callback(stop, process)
        head = GymHead(http, f"http://{address}")
        agents = await self._wait_until_ready(process, head, scratch, log_start)
        return Service(agents, head.check, process)

    async def _wait_until_ready(
        self, process: ChildProcess, head: GymHead, scratch: Path, log_start: int
    ) -> Mapping[str, str]:
        async def agents_when_ready() -> Mapping[str, str] | None:
            # Asked first: whoever answers at a port that was taken is another Gym.
            if _port_taken(self.log_file, log_start):
                raise _PortTaken(f"NeMo Gym found a port of its own taken; {process.log_end()}")
            try:
                await head.check()
                config = await head.config()
            except (httpx.HTTPError, Unwell):
                return None
            return head.agents(config) if config.get("uv_venv_dir") == str(scratch / "v") else None

        try:
            return await process.wait_for(
                agents_when_ready, what="answer from all servers", timeout_seconds=self.timeout_seconds
            )
        except StartFailed:
            if _port_taken(self.log_file, log_start):
                raise _PortTaken(f"NeMo Gym found a port of its own taken; {process.log_end()}") from None
            raise


def _port_taken(log_file: Path, start: int) -> bool:
    with log_file.open("rb") as log:
        log.seek(start)
        return _PORT_TAKEN.encode() in log.read().lower()


async def check_installation(venv: Path) -> None:
    """Raise `StartFailed` unless `venv` has nemo-gym, new enough."""
    hint = f"set TOKENTAPE_GYM_VENV to a virtual environment with nemo-gym 0.4 or newer (now: {venv})"
    python = venv / "bin" / "python"
    if not python.exists() or not (venv / "bin" / "activate").exists():
        raise StartFailed(f"there is no virtual environment with NeMo Gym; {hint}")
    version = await _output(
        str(python), "-I", "-c", "from importlib.metadata import version as v; print(v('nemo-gym'))"
    )
    if version is None:
        raise StartFailed(f"nemo-gym is not installed there; {hint}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_VERSION:
        raise StartFailed(f"nemo-gym {version} is too old; {hint}")


async def _output(*command: str) -> str | None:
    """Return what a command printed; `None` where it failed or took a minute."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode().strip() if process.returncode == 0 else None


def _make_scratch(venv: Path) -> Path:
    """Return a new directory with Gym's HOME `h`, temporary `t`, working `w`, and environments `v`. Names are short."""
    root = tempfile.gettempdir()
    scratch = Path(tempfile.mkdtemp(prefix="tt-", dir=root if len(root) <= _LONGEST_TEMPORARY_ROOT else "/tmp"))  # noqa: S108
    for name in ("h", "t", "w"):
        (scratch / name).mkdir()
    # Gym looks for each server's environment at <uv_venv_dir>/<type>/<server>/.venv, and would make one with uv.
    site_packages = next((venv / "lib").glob("python3*/site-packages"))
    for kind in ("resources_servers", "responses_api_agents", "responses_api_models"):
        for server in (site_packages / kind).iterdir():
            if server.is_dir():
                (scratch / "v" / kind / server.name).mkdir(parents=True)
                (scratch / "v" / kind / server.name / ".venv").symlink_to(venv.absolute())
    return scratch


def _command(spec: GymSpec, scratch: Path, head: Address, policy_base_url: str) -> list[str]:
    return [
        str(spec.venv.absolute() / "bin" / "gym"),
        *("env", "start"),
        f"+config_paths=[{','.join(spec.configs)}]",
        f"+policy_base_url={policy_base_url}",
        "+policy_api_key=EMPTY",
        f"+policy_model_name={spec.policy_model_name}",
        # The tape has the ids. Without this each turn would echo every earlier prompt's.
        "++policy_model.responses_api_models.vllm_model.return_token_id_information=false",
        "+skip_venv_if_present=true",
        f"+uv_venv_dir={scratch / 'v'}",
        # It serves the whole configuration without asking who wants it.
        f"+head_server.host={head.host}",
        f"+head_server.port={head.port}",
        f"+default_host={_HOST}",
        *spec.overrides,
    ]


def _environment(inherited: Mapping[str, str], venv: Path, scratch: Path) -> dict[str, str]:
    """Return Gym's environment: the inherited one without the trainer's Python and Ray."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_FOREIGN_VARIABLES)}
    loopback = ",".join(filter(None, [inherited.get("no_proxy"), _HOST, "localhost"]))
    return kept | {
        "PATH": f"{venv.absolute() / 'bin'}:{inherited.get('PATH', os.defpath)}",
        "HOME": str(scratch / "h"),
        "TMPDIR": str(scratch / "t"),
        "RAY_TMPDIR": str(scratch / "t"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        # Gym's children ask the head server with `requests`, which would ask a proxy.
        "no_proxy": loopback,
        "NO_PROXY": loopback,
    }
