"""No secret is told: a whole run with known secrets, all at its loudest, and then everything that it has written.

Secrets are the tokens, the bridge's key, the tapes' reader tokens, and, until they are sealed, their ids. Looked at are
the logs, the rows and tapes, and the command lines and environments of all processes while it ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.certificates import secret_file

pytestmark = pytest.mark.timeout(180)

TOKENS = {"data": "the-data-token-4711", "control": "the-control-token-4712", "keys": "the-bridges-key-4713"}
AGENT = Path(__file__).parent.parent / "support" / "telling_agent.py"
MARK = "TOKENTAPE_TEST_RUN"
SECONDS = 150


@dataclass
class Told:
    """What a run has told."""

    directory: Path
    output: str
    processes: set[str] = field(default_factory=set[str])
    """Command lines and environments."""

    @property
    def tapes(self) -> list[tuple[str, str]]:
        """The ids and the reader tokens of its tapes."""
        lines = (self.directory / "reader-tokens").read_text().splitlines()
        return [(line.split()[0], line.split()[1]) for line in lines]

    @property
    def files(self) -> dict[str, str]:
        """The rows and the tapes."""
        return {name: (self.directory / name).read_text() for name in ("rows", "tapes")}


@dataclass(frozen=True)
class Stage:
    """A sidecar with all its guards, at its loudest, for one run."""

    directory: Path
    sidecar: str
    log_file: Path

    def file(self, name: str) -> Path:
        """Return the file of the secret `name`."""
        return self.directory / name

    def rollouts(self, *options: str) -> Told:
        """Run two rollouts, of which one fails."""
        tasks = [{"question": "What is 2 + 3?", "fails": fails} for fails in (False, True)]
        (self.directory / "prompts").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
        command = [
            *(str(Path(sys.executable).with_name("tokentape-rollout")), str(self.directory / "prompts")),
            *("-o", str(self.directory / "rows"), "--tapes", str(self.directory / "tapes")),
            *("--reader-tokens", str(self.directory / "reader-tokens")),
            *("--agent", f"{AGENT}:Telling", "--sidecar", self.sidecar),
            *("--sidecar-token-file", str(self.file("data")), *options),
        ]
        mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: mark, "TOKENTAPE_LOG_DIR": str(self.directory / "logs")}
        log = self.directory / "output"
        processes: set[str] = set()
        with log.open("wb") as output:
            running = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            while running.poll() is None:
                processes |= _told_by_processes(mark)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(0.2)
        assert running.returncode == 1, log.read_text()
        return Told(self.directory, log.read_text(), processes)


def _told_by_processes(mark: str) -> set[str]:
    """Return the command lines and environments of this run's processes."""
    told: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get(MARK) == mark:
                told |= {" ".join(process.cmdline()), process.name(), json.dumps(environment)}
    return told


@pytest.fixture
def stage(tmp_path: Path, model_directory: Path) -> Iterator[Stage]:
    from integration.conftest import ServerProcess, scripted_sidecar_command  # noqa: PLC0415 - a conftest

    for name, secret in TOKENS.items():
        secret_file(tmp_path / name, secret)
    script = {
        "model": {"name": "toy", "vocab_size": 49152, "eos_token_ids": [2]},
        "calls": [{"steps": [{"text": "It is five.", "delay_ms": 50}, {"token_ids": [2]}]}],
        "repeat": True,
    }
    command = [
        *scripted_sidecar_command(tmp_path, model_directory, script, "main", "127.0.0.1:0"),
        *("--token-file", str(tmp_path / "data"), "--log-level", "debug"),
        *("--control", f"unix:{tmp_path}/run/control", "--control-token-file", str(tmp_path / "control")),
    ]
    with ServerProcess(command, tmp_path) as sidecar:
        yield Stage(tmp_path, sidecar.address, sidecar.log_file)


def check(told: Told, *logs: Path) -> None:
    """Assert that nothing secret was told, and that there was something to tell."""
    tapes = told.tapes
    assert len(tapes) == 2
    rows = [json.loads(line) for line in told.files["rows"].splitlines()]
    assert sorted(row["status"] for row in rows) == ["completed", "failed"]
    reader_tokens = [token for _, token in tapes]
    tape_ids = [tape_id for tape_id, _ in tapes]
    assert {row["tape_id"] for row in rows if row["status"] == "completed"} < set(tape_ids)
    for name, text in told.files.items():
        assert _found([*TOKENS.values(), *reader_tokens], text) == [], name
    for log in logs:
        text = log.read_text()
        assert text.strip(), log
        assert _found([*TOKENS.values(), *reader_tokens, *tape_ids], text) == [], log
    assert "telling" in told.output
    assert "HTTP Request: POST" in told.output
    assert _found([*TOKENS.values(), *reader_tokens, *tape_ids], told.output) == []
    assert len(told.processes) > 2
    assert _found([*TOKENS.values(), *reader_tokens, *tape_ids], "\n".join(told.processes)) == []


def _found(secrets: list[str], text: str) -> list[str]:
    return [text[max(0, at - 200) : at + 80] for secret in secrets if (at := text.find(secret)) >= 0]


def test_a_run_with_a_given_bridge_tells_no_secret(stage: Stage, tmp_path: Path) -> None:
    from integration.conftest import Bridge  # noqa: PLC0415 - a conftest

    keys = stage.file("keys")
    command = [
        *("tokentape-bridge", "--listen", "127.0.0.1:0", "--sidecar", f"main={stage.sidecar}"),
        *("--api-key-file", str(keys), "--sidecar-token-file", str(stage.file("data")), "--log-level", "debug"),
    ]
    with Bridge(command, tmp_path) as bridge:
        told = stage.rollouts("--bridge", f"http://{bridge.address}", "--bridge-key-file", str(keys))
        check(told, stage.log_file, bridge.log_file)


def test_a_run_that_starts_its_bridge_tells_no_secret_and_hands_its_access_on_by_files(stage: Stage) -> None:
    told = stage.rollouts()
    check(told, stage.log_file, *(stage.directory / "logs").iterdir())
    assert any(f"--sidecar-token-file {stage.file('data')}" in command for command in told.processes)
