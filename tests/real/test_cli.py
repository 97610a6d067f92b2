"""`tokentape-rollout` with real vLLM and real NeMo Gym, which it starts itself: interrupted, resumed, engine killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokentape_executor.tape_file import read_tapes

MARK = "TOKENTAPE_TEST_RUN"
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENTAPE_START_TIMEOUT": "200",
}
VLLM = ("--", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048")
SECONDS = 240


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have the mark in their environment."""

    def has_mark(process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == mark
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if has_mark(process)]


def wait_until(condition: Callable[[], object], running: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert running.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_math_questions_interrupted_and_resumed(
    tmp_path: Path, checkout: Path, model_directory: Path, request: pytest.FixtureRequest
) -> None:
    output, log, mark = tmp_path / "results.jsonl", tmp_path / "log", uuid.uuid4().hex
    command = [
        *(str(Path(sys.executable).with_name("tokentape-rollout")), "-o", str(output), "--model", str(model_directory)),
        *(str(checkout / "executor" / "examples" / "questions.jsonl"), "--limit", "6", "--concurrency", "2"),
        *("--temperature", "0.7", "--max-tokens", "48", "--tapes", str(tmp_path / "tapes.jsonl"), *VLLM),
    ]

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **ENVIRONMENT, MARK: mark})

    running = start()
    request.addfinalizer(lambda: running.kill() or running.wait())
    wait_until(lambda: rows_in(output), running, log)
    running.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert running.wait(SECONDS) == 130
    assert time.monotonic() - sent < 8
    first = rows_in(output)
    assert 1 <= len(first) < 6
    assert "run the same command again to continue" in log.read_text()
    assert "Traceback" not in log.read_text()
    deadline = time.monotonic() + 10
    while marked(mark):
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.1)

    running = start()
    wait_until(lambda: len(rows_in(output)) > len(first), running, log)
    # Not by the mark: vLLM's engine writes its name over its environment.
    children = psutil.Process(running.pid).children(recursive=True)
    (engine,) = [child for child in children if "EngineCore" in f"{child.name()} {child.cmdline()}"]
    engine.kill()
    assert running.wait(SECONDS) == 0, log.read_text()
    rows = rows_in(output)
    assert [row["prompt_index"] for row in rows] == list(range(6))
    assert [row for row in rows if row in first] == sorted(first, key=lambda row: row["prompt_index"])
    for row in rows:
        assert row["status"] == "completed"
        assert row["receipt"]["sampled"] == row["receipt"]["kept"] + sum(row["receipt"]["dropped"].values()) > 0
    hashes = {row["receipt"]["ledger_sha256"] for row in rows}
    assert {tape.trajectory().receipt.ledger_sha256 for tape in read_tapes(tmp_path / "tapes.jsonl")} >= hashes
