"""NeMo Gym as a child process: its servers, its Ray, and `POST /run`.

Gym wants another Python than the engine, so it runs from its own virtual environment and is spoken to by HTTP. What it
starts (about 27 processes, most of them Ray's) lives in one session with a private HOME and temporary directory, and
goes with it; see `processes.py`. Its servers listen on 127.0.0.1 only; Ray's own ports ask for a token that only this
Ray's processes know. A Ray that this process belongs to is neither used nor seen.

Nothing is installed at start: each server's `.venv` is a link to Gym's own environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import httpx
import yaml

from tokentape_executor.errors import AgentFailed, AgentUnavailable, StartFailed
from tokentape_executor.processes import ChildProcess

_HOST = "127.0.0.1"
_OLDEST_VERSION = (0, 4)
_LONGEST_TEMPORARY_ROOT = 22
"""Ray's Unix sockets lie 85 characters below it, and their paths may have 107."""
_FOREIGN_VARIABLES = ("RAY_", "PYTHON", "VIRTUAL_ENV")
"""Prefixes of variables that are about the trainer's Ray and Python, and would mislead Gym's."""
_QUOTED_CHARACTERS = 1000

Row = Mapping[str, Any]
"""One task as NeMo Gym takes it: `responses_create_params`, and what the environment's verifier wants beside it."""


class NemoGym:
    """A running NeMo Gym. Belongs to the event loop that started it; `stop` may be called from anywhere."""

    def __init__(self, process: ChildProcess, agents: Mapping[str, str], default_agent: str) -> None:
        """Use `start`. `agents` maps agents' names to their base URLs."""
        self.agents = agents
        self._process = process
        self._default_agent = default_agent
        # A rollout takes as long as it takes; the caller bounds it. Loopback wants no proxy.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None), limits=httpx.Limits(max_connections=None), trust_env=False
        )

    @classmethod
    async def start(
        cls,
        *,
        venv: Path,
        configs: tuple[str, ...],
        default_agent: str,
        policy_base_url: str,
        policy_model_name: str,
        log_file: Path,
        timeout_seconds: float,
        overrides: tuple[str, ...] = (),
    ) -> Self:
        """Start Gym's servers and return when all of them answer.

        `venv` is Gym's virtual environment, `configs` its configuration files, `overrides` changes to what they say
        (Hydra's: `++KEY.KEY=VALUE`), `policy_base_url` the OpenAI base URL (with `/v1`) that its model server calls.
        Raises `StartFailed` where `venv` has no nemo-gym of 0.4 or newer, a server is not ready within
        `timeout_seconds`, or there is no agent `default_agent`.
        """
        await asyncio.to_thread(_check_installation, venv)
        scratch = _make_scratch(venv)
        port = _free_port()
        process = ChildProcess.start(
            "NeMo Gym",
            _command(
                venv=venv,
                configs=configs,
                overrides=overrides,
                scratch=scratch,
                port=port,
                policy_base_url=policy_base_url,
                policy_model_name=policy_model_name,
            ),
            log_file=log_file,
            environment=_environment(os.environ, venv, scratch),
            directory=scratch / "w",
            scratch=scratch,
        )
        try:
            agents = await _wait_for_servers(process, f"http://{_HOST}:{port}", timeout_seconds)
            if default_agent not in agents:
                raise StartFailed(f"NeMo Gym has no agent {default_agent!r}; it has {sorted(agents)}")
        except BaseException:
            # Also when cancelled: what was started here is ended here.
            process.stop()
            raise
        return cls(process, agents, default_agent)

    async def run(self, row: Row) -> dict[str, Any]:
        """Run one rollout and return the verifier's response, with `reward` and the agent's `response`.

        The row's `agent_ref.name` picks the agent. Takes as long as the rollout does; cancelling it stops the waiting,
        not the agent. Raises `AgentFailed` where the agent answers with an error or with no JSON object,
        `AgentUnavailable` where it does not answer.
        """
        agent = cast("Mapping[str, str]", row.get("agent_ref") or {}).get("name") or self._default_agent
        if agent not in self.agents:
            raise AgentFailed(f"NeMo Gym has no agent {agent!r}; it has {sorted(self.agents)}")
        try:
            response = await self._http.post(f"{self.agents[agent]}/run", json=dict(row))
        except httpx.HTTPError as error:
            ended = "" if self._process.running else f"; NeMo Gym has ended, its log with:\n{self._process.log_tail()}"
            raise AgentUnavailable(f"agent {agent}: {type(error).__name__}: {error}{ended}") from error
        if response.is_error:
            raise AgentFailed(f"agent {agent} answered {response.status_code}: {_readable(response.text)}")
        try:
            report = response.json()
        except ValueError:
            report = None
        if not isinstance(report, dict):
            raise AgentFailed(
                f"agent {agent} answered {response.status_code} without a JSON object: {_readable(response.text)}"
            )
        return cast("dict[str, Any]", report)

    async def close(self) -> None:
        """Close the connections and stop Gym."""
        await self._http.aclose()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop Gym and all that it started; blocks for two seconds or so. Stopping again does nothing."""
        self._process.stop()


def _readable(text: str) -> str:
    """Return `text` for a message: at most its ends, and without the escapes of JSON within JSON within JSON.

    Each of Gym's servers quotes the answer of the one behind it, which doubles the backslashes; the cause is the last.
    """
    text = re.sub(r"\\+n", "\n", text)
    text = re.sub(r"\\+([\"'])", r"\1", text)
    text = re.sub(r"\\{2,}", r"\\", text)
    if len(text) <= _QUOTED_CHARACTERS:
        return text
    half = _QUOTED_CHARACTERS // 2
    return f"{text[:half]} […] {text[-half:]}"


def _check_installation(venv: Path) -> None:
    """Raise `StartFailed` unless `venv` has nemo-gym, new enough."""
    hint = f"set TOKENTAPE_GYM_VENV to a virtual environment with nemo-gym 0.4 or newer (now: {venv})"
    python = venv / "bin" / "python"
    if not python.exists() or not (venv / "bin" / "activate").exists():
        raise StartFailed(f"there is no virtual environment with NeMo Gym; {hint}")
    script = "from importlib.metadata import version; print(version('nemo-gym'))"
    found = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    version = found.stdout.strip()
    if found.returncode != 0:
        raise StartFailed(f"nemo-gym is not installed there; {hint}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_VERSION:
        raise StartFailed(f"nemo-gym {version} is too old; {hint}")


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


def _command(
    *,
    venv: Path,
    configs: tuple[str, ...],
    overrides: tuple[str, ...],
    scratch: Path,
    port: int,
    policy_base_url: str,
    policy_model_name: str,
) -> list[str]:
    return [
        str(venv.absolute() / "bin" / "gym"),
        *("env", "start"),
        f"+config_paths=[{','.join(configs)}]",
        f"+policy_base_url={policy_base_url}",
        "+policy_api_key=EMPTY",
        f"+policy_model_name={policy_model_name}",
        # The tape has the ids. Without this each turn would echo every earlier prompt's.
        "++policy_model.responses_api_models.vllm_model.return_token_id_information=false",
        "+skip_venv_if_present=true",
        f"+uv_venv_dir={scratch / 'v'}",
        # It serves the whole configuration without asking who wants it.
        f"+head_server.host={_HOST}",
        f"+head_server.port={port}",
        f"+default_host={_HOST}",
        *overrides,
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


def _free_port() -> int:
    """Return a port that is free now. Gym takes no port 0; should another take this one first, the start fails."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


async def _wait_for_servers(process: ChildProcess, head_url: str, timeout_seconds: float) -> dict[str, str]:
    """Wait until every server of Gym answers; return the agents' base URLs by name."""
    async with httpx.AsyncClient(base_url=head_url, timeout=5.0, trust_env=False) as http:

        async def agents_when_ready() -> dict[str, str] | None:
            try:
                instances = cast("list[dict[str, Any]]", (await http.get("/server_instances")).json())
                answers = [await http.get(f"http://{_HOST}:{instance['port']}/") for instance in instances]
            except httpx.TransportError:
                return None
            if not answers or any(answer.is_error for answer in answers):
                return None
            # A JSON string that holds YAML.
            text = json.loads((await http.get("/global_config_dict_yaml")).text)
            return _agent_urls(cast("dict[str, Any]", yaml.safe_load(text)))

        return await process.wait_for(
            agents_when_ready, what="answer from all servers", timeout_seconds=timeout_seconds
        )


def _agent_urls(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the agents' base URLs from Gym's resolved configuration, `{name: {responses_api_agents: {…: {…}}}}`."""
    urls: dict[str, str] = {}
    for name, instance in config.items():
        if isinstance(instance, dict) and "responses_api_agents" in instance:
            (server,) = cast("dict[str, dict[str, Any]]", instance["responses_api_agents"]).values()
            urls[name] = f"http://{server['host']}:{server['port']}"
    return urls
